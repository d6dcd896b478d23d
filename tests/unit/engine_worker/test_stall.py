from __future__ import annotations

from engine_worker.stall import StallClock


def looks(clock: StallClock, start_s: int, end_s: int, marker: object, *, busy: bool = True) -> list[int]:
    """Look every second; return when it was stalled."""
    return [second for second in range(start_s, end_s) if clock.stalled(marker, float(second), busy=busy)]


def test_what_stands_still_longer_than_the_limit_is_stalled() -> None:
    clock = StallClock(60.0, 0.0)
    assert looks(clock, 0, 100, "a") == list(range(61, 100))


def test_progress_and_rest_begin_anew() -> None:
    clock = StallClock(60.0, 0.0)
    assert looks(clock, 0, 60, 7) == []
    assert looks(clock, 60, 120, 8) == []
    assert looks(clock, 120, 300, 8, busy=False) == []
    assert looks(clock, 300, 360, 8) == []
    assert clock.stalled(8, 360.0, busy=True)


def test_a_frozen_look_says_nothing_and_the_count_begins_anew_after_it() -> None:
    clock = StallClock(60.0, 0.0)
    assert looks(clock, 0, 59, 1) == []
    assert looks(clock, 500, 560, 1) == []
    assert looks(clock, 561, 563, 1) == [561, 562]


def test_a_short_limit_survives_gaps_of_less_than_half_of_it() -> None:
    clock = StallClock(2.0, 0.0)
    assert [clock.stalled(1, at_s, busy=True) for at_s in (0.0, 0.9, 1.8, 2.7, 4.0, 4.9)] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
