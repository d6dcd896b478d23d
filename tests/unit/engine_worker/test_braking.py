"""Each change of the brake is said once."""

from __future__ import annotations

import pytest

from engine_worker.braking import BrakeTeller


def test_what_is_braked_and_what_is_listened_to_again_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, bool]] = []
    teller = BrakeTeller(lambda probe, on: told.append((probe, on)))
    for braked in ({"b", "a"}, {"a", "b"}, {"b"}, {"b", "c"}, set()):
        teller.see(frozenset(braked))
    assert told == [("a", True), ("b", True), ("a", False), ("c", True), ("b", False), ("c", False)]
    assert [record.levelname for record in caplog.records] == [
        "ERROR",
        "ERROR",
        "WARNING",
        "ERROR",
        "WARNING",
        "WARNING",
    ]
    assert "undercurrent probe resume a`" in caplog.records[0].getMessage()
