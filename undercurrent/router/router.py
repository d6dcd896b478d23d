"""The router: who judges a record, and what comes of it.

`route` looks the record's binding up in two dictionaries and leaves the rest to it. It takes no lock of the router on
the way, so no request waits for another's probe.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread, get_ident
from types import TracebackType
from typing import Self

from undercurrent.core import ProbeRegistry, ProbeResult, ProbeSignal, RequestContext
from undercurrent.errors import RouterError
from undercurrent.router.binding import Deadline
from undercurrent.router.checks import check_count, check_request, checked_points, overflow, seconds
from undercurrent.router.circuit import Circuits
from undercurrent.router.live import LiveRequests
from undercurrent.router.metrics import MetricsSnapshot
from undercurrent.router.plan import BindingPlan
from undercurrent.router.pool import WorkerPool
from undercurrent.router.reporting import EndListener, LogSink, MetricsSink, Reporter
from undercurrent.router.requests import LiveRequest, RequestHandle
from undercurrent.spec import ActivationRecord, ExtractionPoint, InterventionPolicy, Overflow

OverflowPolicy = Overflow
"""What happens to a record of an async point when its queue is full: drop_oldest, drop_newest, block."""

_log = logging.getLogger(__name__)


class Router:
    """Runs probes on the records of live requests, in this process.

    Each registered request has a fresh probe per point, which hears `on_start`, then its records one at a time and in
    order, then `on_end` once. What a point says decides how it runs:

    - inline, intervention `reject`: the probe runs inside `route`, which returns its signal.
    - inline, `block_until_signal`: a worker's thread runs it; `route` waits at most `timeout_ms` for its answer, then
      returns the fallback: a signal of the action `on_timeout` with `intervention_fallback`, `reason` (`timeout`,
      `probe_error` or `request_ended`), `extraction_point_name` and `timeout_ms` in its metadata. The probe still sees
      that record. A late answer that flags or aborts is returned by the next `route` (metadata `late`) unless that has
      a signal of its own which asks for as much.
    - async: the record waits in a bounded queue; `route` returns None at once. Any number of queues share the workers,
      which take a few records of each in turn. The record is kept until the probe saw it: its tensor's memory must not
      be used again before.

    A probe that raises, or returns what is no signal, gives a signal to continue with `router_error` and `error` in its
    metadata; it goes on with the next record. When a point fails `circuit_breaker_threshold` times in a row (errors,
    and timeouts of awaited answers, over all requests), its circuit opens: that is logged, a flag signal with
    `router_event: circuit_opened` goes to the log sinks, and nothing waits for the point any more: it runs as reject,
    with what was awaited handed over to a worker, its acting signals returned as late ones. As many answers in a row,
    in time, close it again.

    The result of a point is what `on_end` returned, with the router's own signals behind the probe's in
    `signal_history`, and in `metadata`, where there is something to say: `dropped`, `router_errors`, `fallbacks`
    (counts), `late_signals`, `drained` (False) and `undrained` (records that the drain gave up). If `on_end` raises,
    or a probe is stuck in a record, the verdict is `error` and `metadata["reason"]` says why; a stuck probe is left
    alone for good: it alone never hears `on_end`.

    Probes, sinks and listeners may use the router, but a probe or sink must not end the request that it belongs to.
    Every method may be called from any thread. After `shutdown` no request and no record is taken any more.

    Args:
        probe_registry: knows the probes that points name.
        worker_pool_size: threads for async points, and as many more for points whose answers are awaited; by default
            four per CPU, at most 32. They are daemons and start when they are needed.
        default_queue_depth: records of one point of one request that may wait, where the point names no number.
        default_overflow_policy: what happens to a record when as many wait, where the point names nothing.
        drain_timeout: seconds that the end of a request waits for records in its queues; a call that runs then has as
            long again, at most 5 s.
        default_intervention_policy: of inline points that name none; None: reject.
        circuit_breaker_threshold: failures in a row that open a point's circuit; None: it never opens.

    Raises:
        RouterError: an argument is wrong.
    """

    def __init__(
        self,
        probe_registry: ProbeRegistry,
        worker_pool_size: int | None = None,
        default_queue_depth: int = 32,
        default_overflow_policy: OverflowPolicy | str = Overflow.DROP_OLDEST,
        drain_timeout: float = 30.0,
        default_intervention_policy: InterventionPolicy | None = None,
        circuit_breaker_threshold: int | None = 5,
    ) -> None:
        size = min(32, 4 * (os.cpu_count() or 1)) if worker_pool_size is None else worker_pool_size
        check_count("worker_pool_size", size)
        check_count("default_queue_depth", default_queue_depth)
        if circuit_breaker_threshold is not None:
            check_count("circuit_breaker_threshold", circuit_breaker_threshold)
        if not isinstance(probe_registry, ProbeRegistry):
            raise RouterError(f"probe_registry is {type(probe_registry).__name__}; accepted: a ProbeRegistry")
        if not isinstance(default_intervention_policy, InterventionPolicy | None):
            kind = type(default_intervention_policy).__name__
            raise RouterError(f"default_intervention_policy is {kind}; accepted: an InterventionPolicy, or None")
        self._drain_timeout_s = seconds("drain_timeout", drain_timeout)
        self._reporter = Reporter()
        self._pools = (WorkerPool(size, "undercurrent-async"), WorkerPool(size, "undercurrent-answer"))
        plan = BindingPlan(
            registry=probe_registry,
            async_pool=self._pools[0],
            answer_pool=self._pools[1],
            queue_depth=default_queue_depth,
            overflow=overflow(default_overflow_policy),
            intervention=default_intervention_policy,
            circuits=Circuits(circuit_breaker_threshold),
            reporter=self._reporter,
        )
        self._live = LiveRequests(plan)
        self._requests = self._live.by_id
        self._closer: int | None = None
        self._claim = Lock()
        self._all_ended = Event()
        # A router that is dropped without shutdown leaves no threads behind.
        self._stop_pools = weakref.finalize(self, _stop, self._pools)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def callback_error_count(self) -> int:
        """Times that a sink or a listener raised."""
        return self._reporter.error_count

    def register_request(
        self, request_id: str, extraction_points: Iterable[ExtractionPoint], ctx: RequestContext | None = None
    ) -> None:
        """Make and start a probe for each point of a request.

        Args:
            request_id: the producer's id.
            extraction_points: the points, a `ProbeSpec` for one; each names its probe in `probe_type`.
            ctx: what each probe is told, with its own point as `extraction_point_config`.

        Raises:
            RouterError: the request is live, two points have one name, a point names no probe, or its probe cannot be
                made or started. Nothing is registered then; probes that were started have heard `on_end`.
            ProbeNotFoundError: a point names a probe that there is not; nothing is registered.
        """
        check_request(request_id, ctx)
        self._live.register(request_id, checked_points(extraction_points), ctx)

    def route(self, record: ActivationRecord) -> ProbeSignal | None:
        """Have a record judged by the probe of its request and point.

        Returns:
            The probe's answer, or what stands in for it; None where it has nothing to say, and for async points.

        Raises:
            RouterError: the request is not live or has not that point. A record that comes after the request's end,
                or while it ends, is refused in the same way; one that waits for room in a queue when the request ends
                is dropped and counted.
        """
        try:
            route = self._requests[record.request_id].routes[record.extraction_point_name]
        except KeyError:
            raise self._live.unknown(record.request_id, record.extraction_point_name) from None
        return route(record)

    def end_request(self, request_id: str) -> dict[str, ProbeResult]:
        """Drain a request's queues, end its probes, and return their results by point, in the points' order.

        It takes no more records from the start of this on. Listeners and metrics sinks are told before it returns.

        Raises:
            RouterError: the request is not live, or one of its own probes or sinks asks for its end.
        """
        return self._live.end(self._live.take(request_id), Deadline.within(self._drain_timeout_s))

    @contextmanager
    def request(
        self,
        *,
        extraction_points: Iterable[ExtractionPoint],
        request_id: str | None = None,
        ctx: RequestContext | None = None,
    ) -> Iterator[RequestHandle]:
        """Register a request for the time of a block; it gives `.request_id`, `.route` and, after it, `.results`.

        Args:
            extraction_points: the points.
            request_id: the producer's id; by default a new UUID.
            ctx: what each probe is told.

        Raises:
            RouterError: as `register_request`.
        """
        own_id = uuid.uuid4().hex if request_id is None else request_id
        check_request(own_id, ctx)
        live = self._live.register(own_id, checked_points(extraction_points), ctx)
        try:
            yield RequestHandle(live, self.route)
        finally:
            if self._live.take_or_wait(live):
                self._live.end(live, Deadline.within(self._drain_timeout_s))

    def on_request_end(self, listener: EndListener) -> None:
        """Have `listener(request_id, results)` called at the end of each request, on the thread that ends it.

        What it raises is logged once and counted in `callback_error_count`.
        """
        self._reporter.add_listener(listener)

    def attach_log_sink(self, sink: LogSink) -> None:
        """Have `sink(request_id, extraction_point_name, signal)` called for each signal that matters.

        These are the flags and aborts of probes, `router_error` signals, fallbacks, and events of circuits, each
        with the record's `token_pos` and `layer` where the probe named none. It is called on the thread that ran the
        probe, which waits for it. What it raises is logged once and counted in `callback_error_count`.
        """
        self._reporter.add_log_sink(sink)

    def attach_metrics_sink(self, sink: MetricsSink) -> None:
        """Have `sink(request_id, extraction_point_name, snapshot)` called for each point at the end of a request.

        What it raises is logged once and counted in `callback_error_count`.
        """
        self._reporter.add_metrics_sink(sink)

    def get_metrics(self, request_id: str, extraction_point_name: str) -> MetricsSnapshot:
        """Return the figures of a live request's point.

        Raises:
            RouterError: the request is not live, or has not that point.
        """
        live = self._requests.get(request_id)
        binding = None if live is None else live.bindings.get(extraction_point_name)
        if binding is None:
            raise self._live.unknown(request_id, extraction_point_name)
        return binding.snapshot()

    def shutdown(self, wait: bool = True, timeout: float | None = None) -> None:
        """End all live requests as `end_request` would, then the threads; a second call only waits.

        Args:
            wait: whether to return only when that is done; else it is done by a thread in the background.
            timeout: seconds for the drain of all requests together; by default the router's `drain_timeout`. A call
                that runs then has as long again, at most 5 s.

        Raises:
            RouterError: the timeout is no duration.
        """
        deadline = Deadline.within(self._drain_timeout_s if timeout is None else seconds("timeout", timeout))
        first = self._claim.acquire(blocking=False)
        if not first:
            if wait and self._closer != get_ident():
                self._all_ended.wait(timeout)
            return
        rest = self._live.take_all()
        if wait:
            self._close(rest, deadline)
            return
        arguments = (rest, deadline)
        Thread(target=self._close, args=arguments, name="undercurrent-router-shutdown", daemon=True).start()

    def _close(self, rest: list[LiveRequest], deadline: Deadline) -> None:
        self._closer = get_ident()
        self._live.adopt(rest)
        try:
            # All of them first: nobody may wait for room in a queue while the others drain.
            for live in rest:
                live.close()
            for live in rest:
                self._live.end(live, deadline)
            self._live.wait_for_others(deadline.returned_at)
        finally:
            self._stop_pools()
            # Idle threads end at once; the floor is for a timeout that the drain has used up.
            until_s = max(deadline.returned_at, time.monotonic() + 0.1)
            busy = [name for pool in self._pools for name in pool.join(until_s)]
            if busy:
                _log.warning("threads that are stuck in a probe end with it: %s", ", ".join(busy))
            self._all_ended.set()


def _stop(pools: Iterable[WorkerPool]) -> None:
    for pool in pools:
        pool.stop()
