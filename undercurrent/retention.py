"""When a record is gone at the latest, from its topic's settings as the brokers have them.

A broker deletes whole segments. A record may share its segment with others that came up to `segment.ms` later, and the
segment goes when the last of them is older than `retention.ms`; the broker looks every
`log.retention.check.interval.ms` and removes the file `file.delete.delay.ms` after. A full segment is closed earlier,
so this is the latest time.

On a compacted topic a value goes after a later record of its key, once the segment that holds both is closed, which
only a further record does, and `max.compaction.lag.ms` has passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CHECK_INTERVAL_MS: Final = 300_000
"""Kafka's default of `log.retention.check.interval.ms`, a setting of the broker."""
DELETE_DELAY_MS: Final = 60_000
NEVER_MS: Final = 2**62
"""At least so many milliseconds is never, as the defaults of some settings have it."""


def deleted_by_ms(
    appended_ms: int, config: Mapping[str, str], check_interval_ms: int = CHECK_INTERVAL_MS
) -> int | None:
    """Return when a record of a deleting topic is gone at the latest, milliseconds since the Unix epoch.

    Args:
        appended_ms: when it was appended.
        config: the topic's settings.
        check_interval_ms: how often the broker looks.

    Returns:
        None where nothing deletes it by time.
    """
    retention_ms, segment_ms = _ms(config, "retention.ms"), _ms(config, "segment.ms")
    if "delete" not in config.get("cleanup.policy", "delete") or retention_ms is None or segment_ms is None:
        return None
    delay_ms = _ms(config, "file.delete.delay.ms")
    return (
        appended_ms
        + segment_ms
        + retention_ms
        + check_interval_ms
        + (DELETE_DELAY_MS if delay_ms is None else delay_ms)
    )


def compacted_by_ms(replaced_ms: int, config: Mapping[str, str]) -> int | None:
    """Return when a value of a compacted topic is gone at the latest, if something is written after its segment's end.

    Args:
        replaced_ms: when a later record of its key was appended.
        config: the topic's settings.

    Returns:
        None where the settings set no bound.
    """
    lag_ms, segment_ms = _ms(config, "max.compaction.lag.ms"), _ms(config, "segment.ms")
    if "compact" not in config.get("cleanup.policy", "") or lag_ms is None or segment_ms is None:
        return None
    delay_ms = _ms(config, "file.delete.delay.ms")
    return replaced_ms + max(lag_ms, segment_ms) + (DELETE_DELAY_MS if delay_ms is None else delay_ms)


def _ms(config: Mapping[str, str], key: str) -> int | None:
    """Return a setting, None where it is not set, or means never."""
    try:
        value = int(config[key])
    except (KeyError, ValueError):
        return None
    return value if 0 <= value < NEVER_MS else None
