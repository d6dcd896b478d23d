"""The pool: lazy threads, turns, the end."""

from __future__ import annotations

import threading
import time
import weakref

from undercurrent.router.pool import RECORDS_PER_TURN, WorkerPool
from undercurrent.testing.waiting import wait_until


class Turn:
    def __init__(self, action=lambda: None):
        self.done = threading.Event()
        self.records = None
        self._action = action

    def run(self, records):
        self.records = records
        try:
            self._action()
        finally:
            self.done.set()


def in_30_s():
    return time.monotonic() + 30


def test_threads_start_when_they_are_needed_and_are_daemons_with_a_name():
    pool = WorkerPool(2, "test-lazy")
    assert pool._threads == []
    for _ in range(5):
        turn = Turn()
        pool.put(turn)
        assert turn.done.wait(30)
        assert turn.records == RECORDS_PER_TURN
    assert [thread.name for thread in pool._threads] == ["test-lazy-0", "test-lazy-1"]
    assert all(thread.daemon for thread in pool._threads)
    pool.stop()
    assert pool.join(in_30_s()) == []


def test_a_turn_that_fails_takes_no_thread(caplog):
    pool = WorkerPool(1, "test-fails")
    pool.put(Turn(lambda: 1 / 0))
    turn = Turn()
    pool.put(turn)
    assert turn.done.wait(30)
    assert "failed" in caplog.records[0].getMessage()
    pool.stop()
    pool.stop()
    assert pool.join(in_30_s()) == []


def test_what_is_ready_runs_before_the_end_and_nothing_starts_after_it():
    pool = WorkerPool(1, "test-end")
    gate = threading.Event()
    first, second = Turn(lambda: gate.wait(30)), Turn()
    pool.put(first)
    pool.put(second)
    pool.stop()
    assert pool.join(time.monotonic()) == ["test-end-0"]
    gate.set()
    assert pool.join(in_30_s()) == []
    assert second.done.is_set()
    idle = WorkerPool(1, "test-late")
    idle.stop()
    idle.put(Turn())
    assert idle._threads == []


def test_a_thread_keeps_nothing_of_what_it_ran():
    pool = WorkerPool(1, "test-forgets")
    turn = Turn()
    gone = weakref.ref(turn)
    done = turn.done
    pool.put(turn)
    assert done.wait(30)
    del turn
    wait_until(lambda: gone() is None, 30, "the turn to be let go")
    pool.stop()
    assert pool.join(in_30_s()) == []
