"""A process of probe hosts ends when one of its threads does, and does not wait for one that never will."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from probe_consumers.service import ProbeService
from probe_consumers.watchdog import EXIT_CODE, Watchdog
from undercurrent.errors import ProbingError


def waits(stop):
    assert stop.wait(30.0)


def service(stop, *, loop=waits, observe=waits, end=lambda _: None, end_s=60.0):
    watched = SimpleNamespace(host=SimpleNamespace(run=loop), point="p")
    parts = SimpleNamespace(run=observe), SimpleNamespace(run=waits)
    return ProbeService([watched], *parts, Watchdog([], 60.0, end), stop, end_s=end_s)


def fails(_stop):
    raise KeyError("a bug")


@pytest.mark.parametrize("thread", ["loop", "observe"])
def test_a_thread_that_fails_ends_the_process(thread):
    stop = threading.Event()
    # Else a process that does not notice would never end.
    running = threading.Thread(target=lambda: stop.wait(10.0) or stop.set(), daemon=True)
    running.start()
    with pytest.raises(KeyError, match="a bug"):
        service(stop, **{thread: fails}).run()


def test_a_loop_that_does_not_end_is_not_waited_for():
    stop, never, ended = threading.Event(), threading.Event(), []
    stop.set()
    with pytest.raises(ProbingError, match="point p did not end"):
        service(stop, loop=lambda _: never.wait(30.0), end=ended.append, end_s=0.05).run()
    never.set()
    assert ended == [EXIT_CODE]
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]
