"""One probe of one request at one point: what it is told, what it said, and how it ends.

`InlineBinding` runs its probe inside `route`; `queued` and `blocking` hold those that run it on a worker's thread.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from threading import RLock
from time import perf_counter
from typing import Any, ClassVar

from undercurrent.core import Probe, ProbeAction, ProbeResult, ProbeSignal, RequestContext
from undercurrent.errors import ProbeError, RouterError
from undercurrent.router.circuit import Circuit
from undercurrent.router.metrics import Metrics, MetricsSnapshot
from undercurrent.router.reporting import Reporter
from undercurrent.router.signals import circuit_signal, describe, error_signal, located
from undercurrent.spec import ActivationRecord

_CONTINUE = ProbeAction.CONTINUE
KEPT_SIGNALS = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wiring:
    """What a binding of any kind is made of.

    Args:
        name: the point's name.
        probe: a fresh instance.
        ctx: what it is told at the start and at the end.
        circuit: the point's.
        reporter: tells sinks.
    """

    name: str
    probe: Probe
    ctx: RequestContext
    circuit: Circuit
    reporter: Reporter


@dataclass(frozen=True, slots=True)
class Deadline:
    """How long the end of a request may wait, on the monotonic clock.

    Args:
        drained_at: records that wait are given up then.
        returned_at: a call that still runs is given up then.
    """

    drained_at: float
    returned_at: float

    @classmethod
    def within(cls, drain_s: float) -> Deadline:
        """Return the deadline of a drain that starts now; a call that runs has as long again, at most 5 s."""
        drained_at = time.monotonic() + drain_s
        return cls(drained_at, drained_at + min(drain_s, 5.0))


class Binding(ABC):
    """A probe at work for one (request, point)."""

    __slots__ = ("_on_activation", "_own_signals", "_wiring", "closed", "metrics")

    _caught: ClassVar[type[BaseException]] = Exception

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._on_activation = wiring.probe.on_activation
        self._own_signals: list[ProbeSignal] = []
        self.metrics = Metrics()
        self.closed = False

    @property
    def name(self) -> str:
        """The point's name."""
        return self._wiring.name

    @property
    def request_id(self) -> str:
        """The producer's id."""
        return self._wiring.ctx.request_id

    @abstractmethod
    def route(self, record: ActivationRecord) -> ProbeSignal | None:
        """Take a record; see `Router.route`."""

    @abstractmethod
    def runs_here(self) -> bool:
        """Return whether the calling thread is inside the probe right now."""

    @abstractmethod
    def close(self) -> None:
        """Take no more records; does not wait."""

    @abstractmethod
    def _settle(self, deadline: Deadline) -> tuple[int, bool]:
        """Wait for the records that were taken; return how many were given up, and whether the probe is at rest."""

    def snapshot(self) -> MetricsSnapshot:
        """Return the figures of now."""
        return self.metrics.snapshot(0)

    def start_probe(self) -> None:
        """Tell the probe of the start; it may raise."""
        self._wiring.probe.on_start(self._wiring.ctx)

    def finish(self, deadline: Deadline) -> ProbeResult:
        """Wait for the records that were taken, end the probe and return its result; comes once, after `close`."""
        undrained, at_rest = self._settle(deadline)
        if at_rest:
            result = self.end_probe()
        else:
            text = "request %s, point %r: the probe is stuck in a record and left alone"
            _log.warning(text, self.request_id, self.name)
            result = self._error_result("on_activation did not return in time; on_end was not called")
        return self._with_notes(result, undrained)

    def end_probe(self) -> ProbeResult:
        """Return the probe's own result, or one of verdict `error` where it gives none."""
        try:
            result = self._wiring.probe.on_end(self._wiring.ctx)
        # A probe may raise anything: its request still ends, and so do the others.
        except (Exception, SystemExit) as exc:
            _log.warning("request %s, point %r: on_end raised", self.request_id, self.name, exc_info=exc)
            return self._error_result(f"on_end raised {describe(exc)}")
        if not isinstance(result, ProbeResult):
            return self._error_result(f"on_end returned {type(result).__name__}; accepted: a ProbeResult")
        return result

    def _error_result(self, reason: str) -> ProbeResult:
        return ProbeResult(self.request_id, self.name, "error", [], {"router_error": True, "reason": reason})

    def _with_notes(self, result: ProbeResult, undrained: int) -> ProbeResult:
        notes = self._notes()
        if undrained:
            notes |= {"drained": False, "undrained": undrained}
        if not notes and not self._own_signals:
            return result
        # A probe may have left either of them None.
        history = [*(result.signal_history or ()), *self._own_signals]
        return replace(result, signal_history=history, metadata={**(result.metadata or {}), **notes})

    def _notes(self) -> dict[str, Any]:
        counts = {
            "dropped": self.metrics.drop_count,
            "router_errors": self.metrics.error_count,
            "fallbacks": self.metrics.fallback_count,
        }
        return {key: count for key, count in counts.items() if count}

    def _judge(self, record: ActivationRecord) -> ProbeSignal | None:
        """Run the probe; whoever calls makes sure that nobody else does."""
        metrics = self.metrics
        failed = False
        started_s = perf_counter()
        try:
            signal = self._on_activation(record)
            if signal is not None and not isinstance(signal, ProbeSignal):
                raise ProbeError(f"on_activation returned {type(signal).__name__}; accepted: a ProbeSignal or None")
        except self._caught as exc:
            metrics.busy_s += perf_counter() - started_s
            failed = True
            signal = self._failed(record, exc)
            self._count_failure()
        else:
            metrics.busy_s += perf_counter() - started_s
            if self._wiring.circuit.failures:
                self._count_answer()
        metrics.activation_count += 1
        if signal is not None and (failed or signal.action is not _CONTINUE):
            self._report(located(signal, record))
        return signal

    def _failed(self, record: ActivationRecord, exc: BaseException) -> ProbeSignal:
        self.metrics.error_count += 1
        if self.metrics.error_count == 1:
            text = "request %s, point %r: the probe raised at token %d; further errors are only counted"
            _log.warning(text, self.request_id, self.name, record.token_pos, exc_info=exc)
        return self._keep(self._error_signal(record, exc))

    def _error_signal(self, record: ActivationRecord, exc: BaseException) -> ProbeSignal:
        return error_signal(record, exc)

    def _keep(self, signal: ProbeSignal) -> ProbeSignal:
        """Keep a signal of ours for the result."""
        if len(self._own_signals) < KEPT_SIGNALS:
            self._own_signals.append(signal)
        return signal

    def _count_failure(self) -> None:
        circuit = self._wiring.circuit
        if circuit.failed():
            text = "point %r: %d failures in a row; it now runs as reject, and nothing waits for it"
            _log.warning(text, self.name, circuit.failures)
            self._report(circuit_signal(self.name, opened=True, threshold=circuit.threshold))

    def _count_answer(self) -> None:
        circuit = self._wiring.circuit
        if circuit.answered():
            _log.info("point %r answers again; its own intervention applies", self.name)
            self._report(circuit_signal(self.name, opened=False, threshold=circuit.threshold))

    def _report(self, signal: ProbeSignal) -> None:
        self._wiring.reporter.signal(self.request_id, self.name, signal)

    def _refusal(self) -> RouterError:
        return RouterError(f"request {self.request_id!r:.60} has ended: point {self.name!r} takes no more records")


class InlineBinding(Binding):
    """Runs its probe inside `route`, one record at a time, in the order in which callers come."""

    __slots__ = ("_busy", "_lock")

    def __init__(self, wiring: Wiring) -> None:
        super().__init__(wiring)
        # Reentrant: a probe or sink that routes into its own point gets an error instead of hanging.
        self._lock = RLock()
        self._busy = False

    def route(self, record: ActivationRecord) -> ProbeSignal | None:
        """Judge a record and return what the probe says."""
        with self._lock:
            if self.closed:
                raise self._refusal()
            if self._busy:
                raise RouterError(f"point {self.name!r}: its probe or sink routes into the point that it judges")
            self._busy = True
            try:
                return self._judge(record)
            finally:
                self._busy = False

    def runs_here(self) -> bool:
        """Return whether the calling thread is inside the probe right now."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._busy
        finally:
            self._lock.release()

    def close(self) -> None:
        """Take no more records. `_settle` takes the lock after this, so whoever comes later sees it."""
        self.closed = True

    def _settle(self, deadline: Deadline) -> tuple[int, bool]:
        if not self._lock.acquire(timeout=max(0.0, deadline.returned_at - time.monotonic())):
            return 0, False
        try:
            return 0, not self._busy
        finally:
            self._lock.release()
