"""From the frames of the ring to records of an in-process router: for programs that embed their engine.

    routes = StreamRouter(ring.reader(), holding, torch_rows)
    route = Route(...); routes.add(route)      # before the engine has the request
    routes.drain()                             # routes everything that the engine has captured so far, in order
    route.complete(computed=...)               # whether every wanted row of the finished request has come
    routes.remove(route)                       # what still comes of it goes nowhere

A request that may stop at any token is read a moment behind its engine; nobody but the thread inside `drain` touches
the ring, and a route's signals are taken by whoever runs its request.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from undercurrent.adapters.route import Route, Stream
from undercurrent.capture.frames import Close, Content, Drop, Fault, Open, Rewind, Step
from undercurrent.capture.holding import Holding
from undercurrent.capture.ring import RingReader
from undercurrent.codec.tensors import INT8, rows_of
from undercurrent.core import ProbeSignal
from undercurrent.errors import CaptureError, ProbingError, RingError
from undercurrent.router import Router
from undercurrent.router.signals import describe
from undercurrent.spec import TensorType

logger = logging.getLogger(__name__)

Rows = Callable[[memoryview, str, tuple[int, ...]], Sequence[Any]]
"""(bytes, NumPy name of an element, shape of a row) -> one float32 tensor for each (token, layer), all copies."""


def numpy_rows(data: memoryview, dtype: str, shape: tuple[int, ...]) -> Sequence[Any]:
    """Return the tensors of some rows as NumPy arrays, each of the given shape: [width], or what its type has."""
    return list(rows_of(data, dtype, math.prod(shape)).astype(np.float32).reshape(-1, *shape))


def torch_rows(data: memoryview, dtype: str, shape: tuple[int, ...]) -> Sequence[Any]:
    """Return the tensors of some rows as tensors of torch, on the CPU; shapes as in `numpy_rows`."""
    import torch

    if dtype == INT8:
        values = torch.from_numpy(rows_of(data, dtype, math.prod(shape)))
    else:
        values = torch.frombuffer(data, dtype=getattr(torch, dtype)).to(torch.float32, copy=True)
    rows: tuple[Any, ...] = values.view(-1, *shape).unbind(0)
    return rows


class _Ear:
    """A log sink that hands a router's signals to the routes of one engine; it keeps nothing else alive."""

    def __init__(self, live: dict[str, Route]) -> None:
        self._live = live

    def __call__(self, request_id: str, name: str, signal: ProbeSignal) -> None:
        route = self._live.get(request_id)
        if route is not None:
            route.heard(name, signal)


class StreamRouter:
    """See the module.

    Args:
        reader: reading side of the ring.
        holding: keeps rows back until their tokens were seen.
        rows: makes the vectors of records.
    """

    def __init__(self, reader: RingReader, holding: Holding, rows: Rows) -> None:
        self._reader = reader
        self._holding = holding
        self._rows = rows
        self._routes: dict[tuple[str, int], Route] = {}
        self._by_engine_id: dict[str, Route] = {}
        self._streams: dict[int, Stream] = {}
        self._by_request_id: dict[str, Route] = {}
        self._heard: WeakSet[Router] = WeakSet()

    def add(self, route: Route) -> None:
        """Expect the streams of a request."""
        self._routes[route.request_id, route.attempt] = route
        self._by_engine_id[route.engine_id] = route
        self._by_request_id[route.request_id] = route
        if route.router not in self._heard:
            self._heard.add(route.router)
            route.router.attach_log_sink(_Ear(self._by_request_id))

    def remove(self, route: Route) -> None:
        """Let what still comes of a request go nowhere."""
        self._routes.pop((route.request_id, route.attempt), None)
        self._by_engine_id.pop(route.engine_id, None)
        self._by_request_id.pop(route.request_id, None)
        # Its streams stay until the engine closes them; a drain may be among them on another thread.
        route.gone = True

    @property
    def busy(self) -> bool:
        """Whether it expects anything."""
        return bool(self._routes)

    def drain(self) -> None:
        """Route everything that was captured before this call and is known to be real; one thread at a time.

        Raises:
            RingError: the ring cannot be trusted any more; every request has been told.
        """
        try:
            for content in self._holding.read(self._reader):
                self._take(content)
                # Rows are copies by now: a slow probe must not keep the space from the engine.
                self._reader.release()
        except RingError as exc:
            self.fail_all(exc)
            raise

    def fail_all(self, error: ProbingError) -> None:
        """Tell every request that its records cannot be had any more."""
        for route in list(self._routes.values()):
            route.error = route.error or error

    def _take(self, content: Content) -> None:
        match content:
            case Step():
                self._step(content)
            case Open():
                route = self._routes.get((content.request_id, content.attempt))
                if route is not None:
                    self._streams[content.stream] = route.open(content)
            case Close():
                self._close(content)
            case Drop():
                for loss in content.losses:
                    _fail(self._streams.get(loss.stream), f"{loss.rows} rows were lost: {content.reason}")
            case Rewind():
                _fail(self._streams.get(content.stream), f"position {content.first_pos} was computed again")
            case Fault():
                for one in [self._of_engine(content.engine_id)] if content.engine_id else list(self._routes.values()):
                    if one is not None:
                        one.error = one.error or CaptureError(f"request {one.request_id!r:.80}: {content.detail}")

    def _of_engine(self, engine_id: str) -> Route | None:
        # vLLM adds a random part, with a hyphen.
        return self._by_engine_id.get(engine_id) or self._by_engine_id.get(engine_id.rpartition("-")[0])

    def _close(self, closed: Close) -> None:
        stream = self._streams.pop(closed.stream, None)
        if stream is None or stream.route.gone:
            return
        stream.closed = True
        if closed.reason != "finished":
            _fail(stream, closed.detail or closed.reason)
        elif closed.emitted != stream.rows:
            _fail(stream, f"{closed.emitted} rows were captured and {stream.rows} arrived")

    def _live(self, number: int) -> Stream | None:
        stream = self._streams.get(number)
        return None if stream is None or stream.route.gone else stream

    def _step(self, step: Step) -> None:
        numbers, counts = step.table()
        streams = [self._live(number) for number in numbers]
        some = next((stream for stream in streams if stream is not None), None)
        if some is None:
            return
        opened, payload = some.opened, step.payload
        data = payload[step.data_at : step.data_at + step.rows * step.row_bytes]
        vectors = self._rows(data, opened.dtype, opened.row_shape or (opened.width,))
        positions = struct.unpack_from(f"<{step.rows}i", payload, step.positions_at)
        depth, at, first = len(opened.layers), step.captured_at_us / 1e6, 0
        for stream, count in zip(streams, counts, strict=True):
            part = slice(first, first + count)
            first += count
            if stream is None:
                continue
            route = stream.route
            try:
                route.take(stream, positions[part], vectors[part.start * depth : first * depth], at)
            # A router that refuses the records of one request must not cost the others theirs.
            except ProbingError as exc:
                route.error = route.error or exc
            # Such as SystemExit of a probe, which a router of its own thread may let pass: the same holds for it.
            except BaseException as exc:
                logger.exception("request %r: its records cannot be routed", route.request_id)
                route.error = route.error or _raised(route, exc)


def _raised(route: Route, exc: BaseException) -> CaptureError:
    error = CaptureError(f"request {route.request_id!r:.80}: routing its records raised {describe(exc)}")
    error.__cause__ = exc
    return error


def _fail(stream: Stream | None, reason: str) -> None:
    if stream is not None:
        route, name = stream.route, TensorType(stream.opened.tensor_type).value
        route.error = route.error or CaptureError(f"request {route.request_id!r}, {name}: {reason}")
