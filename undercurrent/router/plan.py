"""How a point becomes a binding."""

from __future__ import annotations

from dataclasses import dataclass, replace

from undercurrent.core import Probe, ProbeRegistry, RequestContext
from undercurrent.errors import ProbeNotFoundError, RouterError
from undercurrent.router.binding import Binding, InlineBinding, Wiring
from undercurrent.router.circuit import Circuits
from undercurrent.router.interventions import BlockingBinding
from undercurrent.router.pool import WorkerPool
from undercurrent.router.queued import AsyncBinding, QueueSettings
from undercurrent.router.reporting import Reporter
from undercurrent.router.signals import describe
from undercurrent.spec import ExecutionMode, ExtractionPoint, InterventionMode, InterventionPolicy, Overflow


@dataclass(frozen=True, slots=True)
class BindingPlan:
    """What a router gives to all of its bindings.

    Args:
        registry: knows the probes.
        async_pool: runs async points.
        answer_pool: runs inline points that `route` waits for; apart, so that no backlog makes an answer late.
        queue_depth: of points that name none.
        overflow: of points that name none.
        intervention: of inline points that name none.
        circuits: one per point.
        reporter: tells sinks.
    """

    registry: ProbeRegistry
    async_pool: WorkerPool
    answer_pool: WorkerPool
    queue_depth: int
    overflow: Overflow
    intervention: InterventionPolicy | None
    circuits: Circuits
    reporter: Reporter

    def bind(self, point: ExtractionPoint, ctx: RequestContext) -> Binding:
        """Return a binding with a fresh probe, which has not been started.

        Raises:
            RouterError: the point names no probe, or its probe cannot be made.
            ProbeNotFoundError: it names one that there is not.
            ProbeError: an entry point offers it and does not load.
        """
        probe = self._spawn(point, ctx.request_id)
        own = replace(ctx, extraction_point_config=point)
        wiring = Wiring(point.name, probe, own, self.circuits.join(point.name), self.reporter)
        return self._of_mode(point, wiring)

    def _spawn(self, point: ExtractionPoint, request_id: str) -> Probe:
        if point.probe_type is None:
            raise RouterError(f"point {point.name!r} names no probe_type, so the router knows no probe for it")
        try:
            factory = self.registry.get(point.probe_type)
        except ProbeNotFoundError as exc:
            raise ProbeNotFoundError(f"point {point.name!r}: {exc}") from exc
        try:
            return factory.spawn(request_id, point.name, **point.probe_args)
        except Exception as exc:  # a probe's constructor may raise anything
            what = f"point {point.name!r}: probe {point.probe_type!r} cannot be made: {describe(exc)}"
            raise RouterError(what) from exc

    def _of_mode(self, point: ExtractionPoint, wiring: Wiring) -> Binding:
        depth, overflow = point.queue_depth or self.queue_depth, point.overflow or self.overflow
        if point.execution_mode is ExecutionMode.ASYNC:
            return AsyncBinding(wiring, QueueSettings(self.async_pool, depth, overflow))
        policy = point.intervention or self.intervention
        if policy is None or policy.mode is InterventionMode.REJECT:
            return InlineBinding(wiring)
        if overflow is Overflow.BLOCK:
            # Only asked where nobody waits for answers any more: then nobody shall wait for room either.
            overflow = Overflow.DROP_OLDEST
        return BlockingBinding(wiring, QueueSettings(self.answer_pool, depth, overflow), policy)
