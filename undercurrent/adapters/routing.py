"""From the frames of the ring to records of an in-process router: for programs that embed their engine.

    routes = StreamRouter(ring.reader(), torch_rows)
    route = Route(...); routes.add(route)      # before the engine has the request
    routes.drain()                             # routes everything that the engine has captured so far, in order
    route.complete(computed=...)               # whether every wanted row of the finished request has come
    routes.remove(route)                       # what still comes of it goes nowhere

A request that may stop at any token is read a moment behind its engine; nobody but the thread inside `drain` touches
the ring, and a route's signals are taken by whoever runs its request.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import ml_dtypes
import numpy as np

from undercurrent.capture.frames import Close, Content, Drop, Fault, Open, Step, decode
from undercurrent.capture.ring import RingReader
from undercurrent.core import ProbeAction, ProbeSignal
from undercurrent.errors import CaptureError, ProbingError, RingError
from undercurrent.router import Router
from undercurrent.router.signals import describe, located
from undercurrent.spec import (
    ActivationRecord,
    CaptureDtype,
    ExecutionMode,
    ExtractionPoint,
    Overflow,
    ProbeKind,
    TensorType,
    UntilKind,
    UntilPolicy,
    parse_position,
)

logger = logging.getLogger(__name__)

Rows = Callable[[memoryview, str, int], Sequence[Any]]
"""(bytes, NumPy name of an element, width) -> one float32 vector [width] for each (token, layer), all copies."""


def numpy_rows(data: memoryview, dtype: str, width: int) -> Sequence[Any]:
    """Return the vectors of some rows as NumPy arrays."""
    element = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    return list(np.frombuffer(data, element).astype(np.float32).reshape(-1, width))


def torch_rows(data: memoryview, dtype: str, width: int) -> Sequence[Any]:
    """Return the vectors of some rows as tensors of torch, on the CPU."""
    import torch

    values = torch.frombuffer(data, dtype=getattr(torch, dtype))
    rows: tuple[Any, ...] = values.to(torch.float32, copy=True).view(-1, width).unbind(0)
    return rows


def capture_of(point: ExtractionPoint) -> ExtractionPoint:
    """Return what the engine captures for a point of an in-process router; points that need the same get equal ones.

    What only the driver can know stays with it: which row is the last one, which token ends the capture, and how the
    probe is run.
    """
    until = UntilPolicy() if point.until.kind is UntilKind.STOP_TOKEN else point.until
    position = parse_position("generated[*]") if point.needs_final_length else point.position
    wanted = replace(
        point,
        name="capture",
        position=position,
        until=until,
        probe_type=None,
        probe_kind=ProbeKind.TRAJECTORY,
        execution_mode=ExecutionMode.ASYNC,
        queue_depth=None,
        intervention=None,
        probe_args={},
        dtype=CaptureDtype.MODEL,
        # The driver reads all the time, and a probe must see every row: the engine waits rather than lose one.
        overflow=Overflow.BLOCK,
        token_ids=True,
    )
    return replace(wanted, name=f"{point.tensor_type.value}-{wanted.point_hash()[:16]}")


@dataclass(frozen=True, slots=True)
class PointSignal:
    """What an inline probe said.

    Args:
        extraction_point_name: of the point that it judges.
        signal: its words, with the record's position and layer where it named none.
    """

    extraction_point_name: str
    signal: ProbeSignal


@dataclass(slots=True)
class _Feed:
    """One point that reads a stream."""

    point: ExtractionPoint
    stop_token: int | None
    kept: deque[tuple[int, Sequence[Any], float]] | None
    ended: bool = False

    @classmethod
    def of(cls, point: ExtractionPoint, stop_token: int | None) -> _Feed:
        rows = -point.position.index - min(0, point.position.offset) if point.needs_final_length else 0
        return cls(point, stop_token, deque(maxlen=rows) if rows else None)


class Route:
    """One request on its way through the router.

    Args:
        request_id: the caller's id.
        attempt: number that no other run of this adapter has.
        engine_id: the engine's id.
        points: what it registered.
        router: where its records go.
        stop: called when an inline probe asks for an abort, from the thread that drains or from the probe's.
        stop_tokens: token id that ends a point with `until: stop_token`, by the point's name.
        collect: keep every signal, not only the one that stops the request.
    """

    def __init__(
        self,
        request_id: str,
        attempt: int,
        engine_id: str,
        points: Sequence[ExtractionPoint],
        router: Router,
        stop: Callable[[], None],
        *,
        stop_tokens: Mapping[str, int],
        collect: bool,
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.engine_id = engine_id
        self.error: ProbingError | None = None
        self.gone = False
        self.stopped_by: PointSignal | None = None
        self.captures: dict[str, ExtractionPoint] = {}
        self._feeds: dict[str, list[_Feed]] = {}
        for point in points:
            capture = capture_of(point)
            self.captures[capture.name] = capture
            self._feeds.setdefault(capture.name, []).append(_Feed.of(point, stop_tokens.get(point.name)))
        self.router = router
        self._stop = stop
        self.collect = collect
        self._signals: deque[PointSignal] = deque()
        self._streams: dict[str, _Stream] = {}

    def take_signals(self) -> tuple[PointSignal, ...]:
        """Return the signals since the last call."""
        # One by one: the thread that routes may add some at the same time.
        return tuple(self._signals.popleft() for _ in range(len(self._signals)))

    def wants_prompt(self, prompt_len: int) -> bool:
        """Whether any of its points wants a token of the prompt."""
        return any(capture.positions(0, prompt_len, prompt_len) for capture in self.captures.values())

    def complete(self, computed: int | None) -> bool:
        """Whether every row that its streams will ever have has been routed.

        Args:
            computed: positions that the engine has computed, prompt included; None where that is not known.
        """
        if len(self._streams) < len(self.captures):
            return False
        return all(stream.closed or stream.has_all(computed) for stream in self._streams.values())

    def finish(self) -> None:
        """Route the rows whose place was known only at the end: what `generated[-k]` names among those computed."""
        for stream in self._streams.values():
            for feed in stream.feeds:
                if feed.kept is None:
                    continue
                total = stream.last_pos - stream.opened.prompt_len + 1
                wanted = feed.point.position.resolve_absolute(stream.opened.prompt_len, total) if total > 0 else None
                for position, row, at in feed.kept:
                    if position == wanted:
                        self._send(stream, feed, position, row, at)
                feed.kept.clear()

    def open(self, opened: Open) -> _Stream:
        """Take up one of its streams."""
        stream = _Stream(self, opened, self.captures[opened.point], self._feeds[opened.point])
        self._streams[opened.point] = stream
        return stream

    def take(
        self, stream: _Stream, positions: Sequence[int], token_ids: Sequence[int], vectors: Sequence[Any], at: float
    ) -> None:
        """Route some positions of one of its streams.

        Args:
            stream: of this route.
            positions: absolute, ascending [n].
            token_ids: input token at each [n].
            vectors: one per (token, layer) [n * layers].
            at: when they were captured, seconds since the Unix epoch.
        """
        depth = len(stream.opened.layers)
        for n, (position, token_id) in enumerate(zip(positions, token_ids, strict=True)):
            stream.rows += 1
            stream.last_pos = position
            row = vectors[n * depth : (n + 1) * depth]
            for feed in stream.feeds:
                if feed.ended:
                    continue
                if feed.kept is not None:
                    feed.kept.append((position, row, at))
                else:
                    self._send(stream, feed, position, row, at)
                feed.ended = token_id == feed.stop_token

    def _send(self, stream: _Stream, feed: _Feed, position: int, row: Sequence[Any], at: float) -> None:
        name, opened = feed.point.name, stream.opened
        is_generated = position >= opened.prompt_len
        for layer, tensor in zip(opened.layers, row, strict=True):
            record = ActivationRecord(
                self.request_id, name, layer, position, feed.point.tensor_type, tensor, is_generated, at
            )
            signal = self.router.route(record)
            if signal is None:
                continue
            said = PointSignal(name, located(signal, record))
            if self.collect and said != self.stopped_by:
                self._signals.append(said)
            if signal.action is ProbeAction.ABORT and self.stopped_by is None:
                self.stopped_by = said
                self._stop()

    def heard(self, name: str, signal: ProbeSignal) -> None:
        """Take what a probe said, on whatever thread it ran: an answer may come when nobody waits for it any more.

        Args:
            name: of the point.
            signal: one that acts.
        """
        point = next((feed.point for feeds in self._feeds.values() for feed in feeds if feed.point.name == name), None)
        if point is None or point.execution_mode is not ExecutionMode.INLINE or self.stopped_by is not None:
            return
        if signal.action is ProbeAction.ABORT:
            self.stopped_by = PointSignal(name, signal)
            if self.collect:
                self._signals.append(self.stopped_by)
            self._stop()


class _Stream:
    """One stream of a route."""

    __slots__ = ("capture", "closed", "feeds", "last_pos", "opened", "route", "rows")

    def __init__(self, route: Route, opened: Open, capture: ExtractionPoint, feeds: list[_Feed]) -> None:
        self.route = route
        self.opened = opened
        self.capture = capture
        self.feeds = feeds
        self.rows = 0
        self.last_pos = -1
        self.closed = False

    def has_all(self, computed: int | None) -> bool:
        if computed is None:
            return False
        opened = self.opened
        return self.rows == len(self.capture.positions(opened.cached_prefix, computed, opened.prompt_len))


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
        rows: makes the vectors of records.
    """

    def __init__(self, reader: RingReader, rows: Rows) -> None:
        self._reader = reader
        self._rows = rows
        self._routes: dict[tuple[str, int], Route] = {}
        self._by_engine_id: dict[str, Route] = {}
        self._streams: dict[int, _Stream] = {}
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
        """Route everything that was captured before this call; one thread at a time.

        Raises:
            RingError: the ring cannot be trusted any more; every request has been told.
        """
        try:
            for frame in self._reader.read():
                self._take(decode(frame))
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

    def _live(self, number: int) -> _Stream | None:
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
        vectors = self._rows(data, opened.dtype, opened.width)
        positions = struct.unpack_from(f"<{step.rows}i", payload, step.positions_at)
        token_ids = struct.unpack_from(f"<{step.rows}i", payload, step.tokens_at)
        depth, at, first = len(opened.layers), step.captured_at_us / 1e6, 0
        for stream, count in zip(streams, counts, strict=True):
            part = slice(first, first + count)
            first += count
            if stream is None:
                continue
            route = stream.route
            try:
                route.take(stream, positions[part], token_ids[part], vectors[part.start * depth : first * depth], at)
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


def _fail(stream: _Stream | None, reason: str) -> None:
    if stream is not None:
        route, name = stream.route, TensorType(stream.opened.tensor_type).value
        route.error = route.error or CaptureError(f"request {route.request_id!r}, {name}: {reason}")
