"""One request on its way from the ring to an in-process router: which rows its points want, and what was said."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from undercurrent.capture.frames import Open
from undercurrent.core import ProbeAction, ProbeSignal
from undercurrent.errors import ProbingError
from undercurrent.router import Router
from undercurrent.router.signals import located
from undercurrent.spec import (
    ActivationRecord,
    ExecutionMode,
    ExtractionPoint,
    Overflow,
    ProbeKind,
)


def capture_of(point: ExtractionPoint) -> ExtractionPoint:
    """Return what the engine captures for a point of an in-process router; points that need the same get equal ones.

    How the probe is run stays with the driver.
    """
    wanted = replace(
        point,
        name="capture",
        probe_type=None,
        probe_kind=ProbeKind.TRAJECTORY,
        execution_mode=ExecutionMode.ASYNC,
        queue_depth=None,
        intervention=None,
        probe_args={},
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

    @property
    def place(self) -> tuple[str, str, int | None, int | None]:
        """Point, action, position and layer: what tells two signals apart, whatever a probe put into them."""
        return self.extraction_point_name, self.signal.action, self.signal.token_pos, self.signal.layer


class Route:
    """One request on its way through the router.

    Args:
        request_id: the caller's id.
        attempt: number that no other run of this adapter has.
        engine_id: the engine's id.
        points: what it registered; a stop token is an id.
        router: where its records go.
        stop: called when an inline probe asks for an abort, from the thread that drains or from the probe's.
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
        collect: bool,
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.engine_id = engine_id
        self.error: ProbingError | None = None
        self.gone = False
        self.stopped_by: PointSignal | None = None
        self.captures: dict[str, ExtractionPoint] = {}
        self._points: dict[str, list[ExtractionPoint]] = {}
        for point in points:
            capture = capture_of(point)
            self.captures[capture.name] = capture
            self._points.setdefault(capture.name, []).append(point)
        self.router = router
        self._stop = stop
        self.collect = collect
        self._signals: deque[PointSignal] = deque()
        self._streams: dict[str, Stream] = {}

    def take_signals(self) -> tuple[PointSignal, ...]:
        """Return the signals since the last call."""
        # One by one: the thread that routes may add some at the same time.
        return tuple(self._signals.popleft() for _ in range(len(self._signals)))

    def wants_prompt(self, prompt_len: int) -> bool:
        """Whether any of its points wants a token of the prompt."""
        return any(
            # An offset may lead from the last tokens back into the prompt.
            capture.position.offset < 0 if capture.needs_final_length else capture.positions(0, prompt_len, prompt_len)
            for capture in self.captures.values()
        )

    def complete(self, computed: int | None) -> bool:
        """Whether every row that its streams will ever have has been routed.

        Args:
            computed: positions that the engine has computed, prompt included; None where that is not known.
        """
        if len(self._streams) < len(self.captures):
            return False
        return all(stream.closed or stream.has_all(computed) for stream in self._streams.values())

    @property
    def at_the_end(self) -> bool:
        """Whether a row may still come that only the end of its stream brings."""
        return any(not stream.closed and stream.capture.needs_final_length for stream in self._streams.values())

    def open(self, opened: Open) -> Stream:
        """Take up one of its streams."""
        stream = Stream(self, opened, self.captures[opened.point], self._points[opened.point])
        self._streams[opened.point] = stream
        return stream

    def take(self, stream: Stream, positions: Sequence[int], vectors: Sequence[Any], at: float) -> None:
        """Route some positions of one of its streams.

        Args:
            stream: of this route.
            positions: absolute, ascending [n].
            vectors: one per (token, layer) [n * layers].
            at: when they were captured, seconds since the Unix epoch.
        """
        depth = len(stream.opened.layers)
        for n, position in enumerate(positions):
            stream.rows += 1
            for point in stream.points:
                self._send(stream, point, position, vectors[n * depth : (n + 1) * depth], at)

    def _send(self, stream: Stream, point: ExtractionPoint, position: int, row: Sequence[Any], at: float) -> None:
        name, opened = point.name, stream.opened
        is_generated = position >= opened.prompt_len
        for layer, tensor in zip(opened.layers, row, strict=True):
            record = ActivationRecord(
                self.request_id, name, layer, position, point.tensor_type, tensor, is_generated, at
            )
            signal = self.router.route(record)
            if signal is None:
                continue
            said = PointSignal(name, located(signal, record))
            if self.collect and (self.stopped_by is None or said.place != self.stopped_by.place):
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
        point = next((point for points in self._points.values() for point in points if point.name == name), None)
        if point is None or point.execution_mode is not ExecutionMode.INLINE or self.stopped_by is not None:
            return
        if signal.action is ProbeAction.ABORT:
            self.stopped_by = PointSignal(name, signal)
            if self.collect:
                self._signals.append(self.stopped_by)
            self._stop()


class Stream:
    """One stream of a route, and how many of its rows have come.

    Args:
        route: it belongs to.
        opened: what its first frame said.
        capture: what the engine captures for it.
        points: those that read it.
    """

    __slots__ = ("capture", "closed", "opened", "points", "route", "rows")

    def __init__(self, route: Route, opened: Open, capture: ExtractionPoint, points: list[ExtractionPoint]) -> None:
        self.route = route
        self.opened = opened
        self.capture = capture
        self.points = points
        self.rows = 0
        self.closed = False

    def has_all(self, computed: int | None) -> bool:
        """Whether every wanted row of so many computed positions has come; never where only the end tells.

        An engine that goes on for a moment may give the last token a row as well.
        """
        if computed is None or self.capture.needs_final_length or self.capture.until.stop_token is not None:
            return False
        opened = self.opened
        return self.rows >= len(self.capture.positions(opened.cached_prefix, computed, opened.prompt_len))
