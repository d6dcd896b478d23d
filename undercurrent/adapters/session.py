"""One running engine with what belongs to it: its loop, its ring, and the thread that routes what the ring holds."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

from undercurrent.adapters.background import BackgroundLoop
from undercurrent.adapters.base import EngineDelta, EngineRequest, OpenEngine
from undercurrent.adapters.route import PointSignal, Route
from undercurrent.adapters.routing import Rows, StreamRouter
from undercurrent.capture.holding import Holding
from undercurrent.capture.lengths import LengthTable
from undercurrent.capture.ring import Ring
from undercurrent.errors import CaptureError, EngineDeadError, RingError, VLLMAdapterLimitationError
from undercurrent.spec import ExtractionPoint

logger = logging.getLogger(__name__)

_TAIL_POLL_S = 0.001
_TAIL_S = 30.0
# What a request that is cancelled needs for its probes to end; a probe that takes longer is left alone.
_REQUESTS_S = 40.0
_CLOSE_S = _REQUESTS_S + 30.0
_THREAD_S = 10.0
# The engine may wait for room in the ring before it says anything: in the middle of a long prefill, for one.
_POLL_S = 0.005
_MAX_HELD_BYTES = 64 << 20


class Session:
    """See the module.

    Args:
        engine: not started; it writes to the ring.
        ring: closed with the session.
        rows: makes the vectors of records.
    """

    def __init__(self, engine: OpenEngine, ring: Ring, rows: Rows) -> None:
        self.engine = engine
        self.background = BackgroundLoop("undercurrent-engine")
        self._ring = ring
        self._lengths = LengthTable(ring.lengths)
        self._streams = StreamRouter(
            ring.reader(), Holding(ring.lengths, max_bytes=_MAX_HELD_BYTES, blocking=None), rows
        )
        self._points_lock = asyncio.Lock()
        self._captures: dict[str, ExtractionPoint] = {}
        self._captures_hold = True
        self._uses: Counter[str] = Counter()
        self._draining = threading.Lock()
        self._drainer: int | None = None
        self._asking = threading.Lock()
        self._asked: list[asyncio.Future[None]] = []
        self._requests: set[asyncio.Task[object]] = set()
        self._wake = threading.Event()
        self._closing = False
        self._ending = False
        self._broken: CaptureError | None = None
        self._thread = threading.Thread(target=self._route_forever, name="undercurrent-routing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the engine and the threads; requests that run are cancelled. In a fork of the process it is nothing."""
        if not self.background.is_here:
            # What this process has of it is shared with the one that goes on using it.
            return
        try:
            self.background.call(self._close(), timeout_s=_CLOSE_S)
        except TimeoutError as exc:
            raise EngineDeadError(f"the engine did not stop within {_CLOSE_S:.0f} s") from exc
        finally:
            self._ending = True
            self._wake.set()
            self._thread.join(_THREAD_S)
            self.background.stop()
            if not self._thread.is_alive():
                self._ring.close()

    async def _close(self) -> None:
        self._closing = True
        requests = list(self._requests)
        for task in requests:
            task.cancel()
        try:
            if requests:
                await asyncio.wait(requests, timeout=_REQUESTS_S)
        finally:
            await self.engine.close()

    def refuse_probes(self, what: str) -> None:
        """Refuse a call that cannot end, since the thread that it would wait for is the caller's.

        Args:
            what: the call, in words.

        Raises:
            VLLMAdapterLimitationError: it comes from a probe that is judging a record right now.
        """
        if self._drainer == threading.get_ident():
            raise VLLMAdapterLimitationError(f"{what} from within a probe would wait for itself for ever")

    async def follow(
        self, request: EngineRequest, route: Route
    ) -> AsyncGenerator[tuple[EngineDelta, tuple[PointSignal, ...]], None]:
        """Generate, and see that every record is routed; the delta with a finish reason comes when all of them were.

        Args:
            request: checked.
            route: where its records go.

        Yields:
            What came, and the signals that the route collected meanwhile.

        Raises:
            CaptureError: records were lost, or a point cannot be captured.
            RouterError: the router refused a record.
            BadRequestError, EngineDeadError: from the engine.
        """
        if self._broken is not None:
            raise self._broken
        async with self._installed(route):
            request, slot = self._with_slot(request)
            self._streams.add(route)
            self._wake.set()
            generated, length, ended = 0, 0, False
            try:
                async with contextlib.aclosing(self.engine.submit(request)) as deltas:
                    async for delta in deltas:
                        generated += len(delta.token_ids)
                        length = delta.prompt_tokens + generated
                        ended = delta.finish_reason is not None
                        self._lengths.tell(slot, 0, length, final=ended)
                        if route.captures:
                            await self._keep_up(route, delta, generated)
                        yield delta, route.take_signals()
            finally:
                self._streams.remove(route)
                # Nobody counts its tokens any more.
                self._lengths.tell(slot, 0, length, final=True)
                self._lengths.free(slot, 1)
                if not ended:
                    # Its caller is gone, or something went wrong: nobody waits for the rest.
                    await asyncio.shield(self.engine.abort(request.engine_id))

    def _with_slot(self, request: EngineRequest) -> tuple[EngineRequest, int]:
        if request.capture is None:
            return request, -1
        slot = self._lengths.take(1)
        return dataclasses.replace(request, capture=dataclasses.replace(request.capture, slot=slot)), slot

    @contextlib.contextmanager
    def listed(self) -> Iterator[None]:
        """Have the running task, a request from its beginning to its end, cancelled when the session closes.

        Raises:
            EngineDeadError: it is closing already.
        """
        if self._closing:
            raise EngineDeadError("the engine is being shut down")
        task = asyncio.current_task()
        if task is not None:
            self._requests.add(task)
        try:
            yield
        finally:
            if task is not None:
                self._requests.discard(task)

    async def _keep_up(self, route: Route, delta: EngineDelta, generated: int) -> None:
        """Have the records behind a delta routed: the rows of a step are in the ring before its tokens are here."""
        if delta.finish_reason is None and not route.collect:
            self._wake.set()
        else:
            await self._routed()
        if delta.finish_reason is not None:
            if delta.finish_reason != "abort":
                # The last token was sampled, not computed.
                await self._settle(lambda: route.complete(delta.prompt_tokens + generated - 1), route)
            else:
                await self._settle(lambda: not route.at_the_end, route)
        if route.error is not None:
            raise route.error

    async def _settle(self, settled: Callable[[], bool], route: Route) -> None:
        """Wait until every row of a request that has ended was routed.

        Args:
            settled: whether it was.
            route: of the request.

        Raises:
            CaptureError: the engine does not say where its streams end.
        """
        deadline = self.background.loop.time() + _TAIL_S
        while not settled() and route.error is None:
            if self.background.loop.time() > deadline:
                raise CaptureError(f"the records of request {route.request_id!r:.80} did not arrive in {_TAIL_S:.0f} s")
            await asyncio.sleep(_TAIL_POLL_S)
            await self._routed()

    @contextlib.asynccontextmanager
    async def _installed(self, route: Route) -> AsyncIterator[None]:
        """Have the engine capture what a request needs as long as it runs; only what is new costs a call."""
        names = tuple(route.captures)
        self._uses.update(names)
        try:
            async with self._points_lock:
                if not self._captures_hold or not self._captures.keys() >= set(names):
                    known = self._captures | route.captures
                    wanted = {name: known[name] for name in self._uses if name in known}
                    # Whoever is cancelled here does not know whether the engine has heard it: the next one says it all.
                    self._captures_hold = False
                    await self.engine.set_points(list(wanted.values()))
                    self._captures, self._captures_hold = wanted, True
            yield
        finally:
            self._uses.subtract(names)
            for name in names:
                if not self._uses[name]:
                    del self._uses[name]

    async def _routed(self) -> None:
        """Wait until everything that is in the ring now has been routed."""
        done = self.background.loop.create_future()
        with self._asking:
            self._asked.append(done)
        self._wake.set()
        await done

    def drain(self) -> None:
        """Route what the ring holds, and tell whoever waits for it. It raises nothing."""
        with self._alone():
            with self._asking:
                asked, self._asked = self._asked, []
            try:
                if self._broken is None:
                    self._streams.drain()
            # The routing thread's edge: without it every request would wait for ever.
            except BaseException as exc:
                logger.exception("routing stops: nothing more can be captured")
                self._broken = exc if isinstance(exc, RingError) else CaptureError(f"routing stopped: {exc}")
                self._streams.fail_all(self._broken)
            if asked:
                self.background.call_soon(_resolve, asked)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._draining:
            self._drainer = threading.get_ident()
            try:
                yield
            finally:
                self._drainer = None

    def _route_forever(self) -> None:
        while not self._ending:
            self._wake.wait(_POLL_S if self._streams.busy else None)
            self._wake.clear()
            self.drain()


def _resolve(asked: list[asyncio.Future[None]]) -> None:
    for done in asked:
        if not done.done():
            done.set_result(None)
