"""When a record is gone at the latest."""

from __future__ import annotations

import pytest

from undercurrent.retention import compacted_by_ms, deleted_by_ms

HOUR = 3_600_000
DELETING = {"cleanup.policy": "delete", "retention.ms": str(24 * HOUR), "segment.ms": str(6 * HOUR)}
COMPACTED = {"cleanup.policy": "compact", "segment.ms": str(6 * HOUR), "max.compaction.lag.ms": str(24 * HOUR)}


def test_a_record_outlives_its_retention_by_its_segment_the_next_look_and_the_file() -> None:
    assert deleted_by_ms(1000, DELETING) == 1000 + 30 * HOUR + 300_000 + 60_000
    assert deleted_by_ms(0, DELETING | {"file.delete.delay.ms": "1000"}, check_interval_ms=0) == 30 * HOUR + 1000


@pytest.mark.parametrize(
    "changes", [{"retention.ms": "-1"}, {"segment.ms": str(2**63 - 1)}, {"cleanup.policy": "compact"}]
)
def test_what_nothing_deletes_by_time_has_no_such_time(changes: dict[str, str]) -> None:
    assert deleted_by_ms(0, DELETING | changes) is None


def test_a_replaced_value_is_compacted_after_the_lag_or_its_segment_whichever_is_longer() -> None:
    assert compacted_by_ms(1000, COMPACTED) == 1000 + 24 * HOUR + 60_000
    assert compacted_by_ms(0, COMPACTED | {"segment.ms": str(48 * HOUR)}) == 48 * HOUR + 60_000


@pytest.mark.parametrize("changes", [{"max.compaction.lag.ms": str(2**63 - 1)}, {"cleanup.policy": "delete"}])
def test_without_a_bound_on_compaction_there_is_none(changes: dict[str, str]) -> None:
    assert compacted_by_ms(0, COMPACTED | changes) is None
