"""A request while it is live: its bindings from their start to their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from undercurrent.core import ProbeResult, ProbeSignal, RequestContext
from undercurrent.errors import RouterError
from undercurrent.router.binding import Binding, Deadline
from undercurrent.router.plan import BindingPlan
from undercurrent.router.signals import describe
from undercurrent.spec import ActivationRecord, ExtractionPoint

Route = Callable[[ActivationRecord], ProbeSignal | None]


class LiveRequest:
    """The bindings of one request.

    Args:
        request_id: the producer's id.
        plan: what its bindings are made of.
    """

    def __init__(self, request_id: str, plan: BindingPlan) -> None:
        self.request_id = request_id
        self.bindings: dict[str, Binding] = {}
        self.routes: Mapping[str, Route] = {}
        self.results: dict[str, ProbeResult] = {}
        self._plan = plan
        self._started: list[Binding] = []

    def start(self, points: Iterable[ExtractionPoint], ctx: RequestContext) -> None:
        """Make the probes and start them; where one fails, those that were started are ended again.

        Raises:
            RouterError: a point is doubled, or its probe does not start.
            ProbeNotFoundError: a point names a probe that there is not.
        """
        try:
            for point in points:
                if point.name in self.bindings:
                    raise RouterError(f"request {self.request_id!r:.60}: two points are called {point.name!r}")
                self.bindings[point.name] = self._plan.bind(point, ctx)
            for binding in self.bindings.values():
                self._started.append(binding)
                self._start(binding)
        except BaseException:
            self.abandon()
            raise
        self.routes = {name: binding.route for name, binding in self.bindings.items()}

    def _start(self, binding: Binding) -> None:
        try:
            binding.start_probe()
        except Exception as exc:
            what = f"request {self.request_id!r:.60}: the probe of point {binding.name!r} did not start: "
            raise RouterError(what + describe(exc)) from exc

    def abandon(self) -> None:
        """End the probes that were started and tell nobody; for a request that was never live."""
        for binding in self._started:
            binding.close()
            binding.end_probe()
        self._leave()

    def runs_here(self) -> bool:
        """Return whether the calling thread is inside one of the probes."""
        return any(binding.runs_here() for binding in self.bindings.values())

    def close(self) -> None:
        """Take no more records; does not wait."""
        for binding in self.bindings.values():
            binding.close()

    def end(self, deadline: Deadline) -> dict[str, ProbeResult]:
        """Wait for the records that were taken, end each probe and return the results in the points' order."""
        self.close()
        self.results = {name: binding.finish(deadline) for name, binding in self.bindings.items()}
        for name, binding in self.bindings.items():
            self._plan.reporter.metrics(self.request_id, name, binding.snapshot())
        self._plan.reporter.ended(self.request_id, self.results)
        self._leave()
        return self.results

    def _leave(self) -> None:
        for name in self.bindings:
            self._plan.circuits.leave(name)


class RequestHandle:
    """What `Router.request` gives: a request that ends with its block.

    Args:
        live: the request.
        route: the router's.
    """

    def __init__(self, live: LiveRequest, route: Route) -> None:
        self._live = live
        self._route = route

    @property
    def request_id(self) -> str:
        """The request's id, as its records have to name it."""
        return self._live.request_id

    @property
    def results(self) -> dict[str, ProbeResult]:
        """The results by point; empty until the request has ended."""
        return self._live.results

    def route(self, record: ActivationRecord) -> ProbeSignal | None:
        """Route a record of this request; see `Router.route`.

        Raises:
            RouterError: it is another request's, or as `Router.route`.
        """
        if record.request_id != self.request_id:
            raise RouterError(f"a record of request {record.request_id!r:.60} came to {self.request_id!r:.60}")
        return self._route(record)
