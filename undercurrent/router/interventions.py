"""Inline points that hold up a generation: a worker's thread runs the probe, `route` waits, but not forever."""

from __future__ import annotations

import time
from threading import TIMEOUT_MAX, Lock
from typing import Any

from undercurrent.core import ProbeSignal
from undercurrent.router.binding import KEPT_SIGNALS, Wiring
from undercurrent.router.queued import QueuedBinding, QueueSettings
from undercurrent.router.signals import error_signal, fallback_signal, located, outweighs
from undercurrent.spec import ActivationRecord, InterventionPolicy


class _Waiter:
    """A record, and whoever waits for its answer. Its fields change under the binding's lock."""

    __slots__ = ("abandoned", "answered", "given_up", "handed_over_s", "judged", "record", "signal", "timed_out")

    def __init__(self, record: ActivationRecord, *, awaited: bool) -> None:
        self.record = record
        self.handed_over_s = time.monotonic()
        self.signal: ProbeSignal | None = None
        self.abandoned = not awaited
        self.timed_out = False
        self.judged = False
        self.given_up = False
        self.answered = Lock()
        self.answered.acquire()


class BlockingBinding(QueuedBinding[_Waiter]):
    """Waits at most `timeout_ms` for the probe's answer to each record, then gives the fallback.

    The probe still sees every record, in order. An answer that comes late is kept: if it asks for more than to go on,
    the next `route` returns it, unless that one's own answer asks for as much. While the point's circuit is open,
    records are handed over and nobody waits; the probe's acting signals are then late answers.
    """

    __slots__ = ("_current", "_late", "_late_signals", "_policy", "_timeout_s")

    def __init__(self, wiring: Wiring, settings: QueueSettings, policy: InterventionPolicy) -> None:
        super().__init__(wiring, settings)
        self._policy = policy
        self._timeout_s = min((policy.timeout_ms or 0) / 1000, TIMEOUT_MAX)
        self._current: _Waiter | None = None
        self._late: ProbeSignal | None = None
        self._late_signals: list[ProbeSignal] = []

    def route(self, record: ActivationRecord) -> ProbeSignal | None:
        """Hand a record over and return the probe's answer, or what stands in for it."""
        own: ProbeSignal | None = None
        if self._wiring.circuit.is_open:
            self._hand_over(record)
        else:
            own = self._ask(record)
        if self._late is None:
            return own
        with self._lock:
            late = self._late
            if late is None or not outweighs(late, own):
                return own
            self._late = None
            return late

    def _hand_over(self, record: ActivationRecord) -> None:
        with self._lock:
            if self.closed:
                raise self._refusal()
            if len(self._items) >= self._depth and not self._make_room():
                return
            self._items.append(_Waiter(record, awaited=False))
            start = self._schedule()
        if start:
            self._pool.put(self)

    def _ask(self, record: ActivationRecord) -> ProbeSignal | None:
        waiter = _Waiter(record, awaited=True)
        reason = self._place(waiter) or self._await(waiter)
        if reason is None:
            return waiter.signal
        if waiter.signal is not None:
            self._report(waiter.signal)
        if reason == "timeout":
            super()._count_failure()
        return waiter.signal

    def _place(self, waiter: _Waiter) -> str | None:
        """Queue a record; return why a fallback stands in for its answer, or None."""
        with self._lock:
            if self.closed:
                raise self._refusal()
            if len(self._items) >= self._depth and not self._wait_for_room(self._timeout_s):
                self.metrics.drop_count += 1
                return self._fall_back(waiter, "request_ended" if self.closed else "timeout")
            self._items.append(waiter)
            start = self._schedule()
        if start:
            self._pool.put(self)
        return None

    def _await(self, waiter: _Waiter) -> str | None:
        """Wait for an answer; return why a fallback stands in for it, or None."""
        remaining_s = waiter.handed_over_s + self._timeout_s - time.monotonic()
        if not waiter.answered.acquire(timeout=max(0.0, remaining_s)):
            with self._lock:
                # The answer may have come between the two.
                if not waiter.judged and not waiter.given_up:
                    waiter.timed_out = waiter.abandoned = True
                    return self._fall_back(waiter, "timeout")
        return "request_ended" if waiter.given_up else None

    def _fall_back(self, waiter: _Waiter, reason: str) -> str:
        """Answer in the probe's place, with the lock held: the result of a request that ends now has it too."""
        waiter.signal = self._keep(fallback_signal(waiter.record, self._policy, reason))
        self.metrics.fallback_count += 1
        return reason

    def _schedule(self) -> bool:
        start = not self._scheduled
        self._scheduled = True
        return start

    def _process(self, item: _Waiter) -> None:
        errors = self.metrics.error_count
        self._current = item
        signal = self._judge(item.record)
        self._current = None
        failed = self.metrics.error_count != errors
        with self._lock:
            item.judged = True
            if not item.abandoned:
                item.signal = signal
            if failed:
                self.metrics.fallback_count += not item.abandoned
            elif item.abandoned and signal is not None:
                self._note_late(located(signal, item.record, late=True))
        if not item.timed_out:  # else `route` counted a failure when it gave up
            in_time = not item.abandoned or time.monotonic() - item.handed_over_s <= self._timeout_s
            self._count(failed=failed or not in_time)
        # Last, so that whoever gets the answer finds the circuit as it left it.
        if not item.abandoned:
            item.answered.release()

    def _count(self, *, failed: bool) -> None:
        if failed:
            super()._count_failure()
        elif self._wiring.circuit.failures:
            super()._count_answer()

    def _note_late(self, signal: ProbeSignal) -> None:
        if len(self._late_signals) < KEPT_SIGNALS:
            self._late_signals.append(signal)
        if signal.acts and outweighs(signal, self._late):
            self._late = signal

    def _give_up(self, item: _Waiter) -> None:
        if not item.abandoned:
            item.given_up = True
            self._fall_back(item, "request_ended")
            item.answered.release()

    def _error_signal(self, record: ActivationRecord, exc: BaseException) -> ProbeSignal:
        if self._current is None or self._current.abandoned:
            return error_signal(record, exc)  # nobody waits for this one
        return fallback_signal(record, self._policy, "probe_error", exc)

    def _count_failure(self) -> None:
        """Leave it to `_process`, which knows whether the record is counted already."""

    def _count_answer(self) -> None:
        """Leave it to `_process`, which knows whether the answer came in time."""

    def _notes(self) -> dict[str, Any]:
        notes = super()._notes()
        if self._late_signals:
            notes["late_signals"] = list(self._late_signals)
        return notes
