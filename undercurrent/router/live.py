"""Which requests are live, and how each of them leaves exactly once."""

from __future__ import annotations

import time
from collections.abc import Iterable
from threading import Condition, get_ident

from undercurrent.core import ProbeResult, RequestContext
from undercurrent.errors import RouterError
from undercurrent.router.binding import Deadline
from undercurrent.router.plan import BindingPlan
from undercurrent.router.requests import LiveRequest
from undercurrent.spec import ExtractionPoint


class LiveRequests:
    """The requests between their registration and their end.

    Whoever takes a request out of `by_id` ends it. Probes are started, drained and ended without the lock.

    Args:
        plan: what bindings are made of.
    """

    def __init__(self, plan: BindingPlan) -> None:
        self.by_id: dict[str, LiveRequest] = {}
        self.closed = False
        self._plan = plan
        self._starting: set[str] = set()
        # By the thread that ends it.
        self._ending: dict[LiveRequest, int] = {}
        self._changed = Condition()

    def register(self, request_id: str, points: Iterable[ExtractionPoint], ctx: RequestContext | None) -> LiveRequest:
        """Start a request's probes and let it take records.

        Raises:
            RouterError: see `Router.register_request`.
            ProbeNotFoundError: a point names a probe that there is not.
        """
        with self._changed:
            if self.closed:
                raise self.unknown(request_id)
            if request_id in self.by_id or request_id in self._starting or self._is_ending(request_id):
                raise RouterError(f"request {request_id!r:.60} is registered already")
            self._starting.add(request_id)
        try:
            live = LiveRequest(request_id, self._plan)
            live.start(points, RequestContext(request_id) if ctx is None else ctx)
            with self._changed:
                if not self.closed:
                    self.by_id[request_id] = live
                    return live
            live.abandon()
            raise self.unknown(request_id)
        finally:
            with self._changed:
                self._starting.discard(request_id)

    def _is_ending(self, request_id: str) -> bool:
        return any(live.request_id == request_id for live in self._ending)

    def take(self, request_id: str) -> LiveRequest:
        """Return a request that the caller has to `end`.

        Raises:
            RouterError: it is not live, or the caller is one of its own probes or sinks.
        """
        with self._changed:
            live = self.by_id.get(request_id)
            if live is None:
                raise self.unknown(request_id)
            if live.runs_here():
                raise RouterError(f"request {request_id!r:.60}: one of its own probes or sinks asks for its end")
            del self.by_id[request_id]
            self._ending[live] = get_ident()
            return live

    def take_or_wait(self, live: LiveRequest) -> bool:
        """Return whether the caller has to `end` the request; False once somebody else has ended it."""
        with self._changed:
            if self.by_id.get(live.request_id) is live:
                self.take(live.request_id)
                return True
            self._changed.wait_for(lambda: self._ending.get(live, get_ident()) == get_ident())
            return False

    def take_all(self) -> list[LiveRequest]:
        """Let no more requests in, and return those that are live: the caller has to `end` them."""
        with self._changed:
            self.closed = True
            rest = list(self.by_id.values())
            self.by_id.clear()
            self._ending.update(dict.fromkeys(rest, get_ident()))
            return rest

    def adopt(self, rest: Iterable[LiveRequest]) -> None:
        """Note that this thread ends what another one has taken."""
        with self._changed:
            self._ending.update(dict.fromkeys(rest, get_ident()))

    def end(self, live: LiveRequest, deadline: Deadline) -> dict[str, ProbeResult]:
        """End a request that was taken, and return its results."""
        try:
            return live.end(deadline)
        finally:
            with self._changed:
                self._ending.pop(live, None)
                self._changed.notify_all()

    def wait_for_others(self, until_s: float) -> None:
        """Wait for the requests that other threads end, until then on the monotonic clock."""
        with self._changed:
            remaining_s = max(0.0, until_s - time.monotonic())
            self._changed.wait_for(lambda: all(who == get_ident() for who in self._ending.values()), remaining_s)

    def unknown(self, request_id: str, name: str | None = None) -> RouterError:
        """Return the error that says why a request, or a point of it, is not here."""
        if self.closed:
            return RouterError("the router is shut down")
        live = self.by_id.get(request_id)
        if live is None or name is None:
            return RouterError(f"request {request_id!r:.60} is not live: it has ended, or was never registered")
        known = ", ".join(live.bindings) or "none"
        return RouterError(f"request {request_id!r:.60} has no point {name!r:.60}; its points: {known}")
