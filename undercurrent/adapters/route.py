"""One request on its way from the ring to an in-process router: which rows its points want, and what was said."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
    UntilKind,
    UntilPolicy,
    parse_position,
)


def capture_of(point: ExtractionPoint) -> ExtractionPoint:
    """Return what the engine captures for a point of an in-process router; points that need the same get equal ones.

    What only the driver can know stays with it: which row is the last one, which token ends the capture, and how the
    probe is run.
    """
    by_token = point.until.kind is UntilKind.STOP_TOKEN
    # An offset may lead from the first generated tokens back into the prompt.
    late = parse_position("*" if point.position.offset < 0 else "generated[*]")
    position = late if point.needs_final_length else point.position
    wanted = replace(
        point,
        name="capture",
        position=position,
        # A token that is skipped may be the one that ends it.
        stride=1 if by_token else point.stride,
        until=UntilPolicy() if by_token else point.until,
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

    def skips(self, position: int, prompt_len: int) -> bool:
        """Whether a position lies between the steps of a stride that the capture leaves to us."""
        if self.stop_token is None or self.point.stride == 1:
            return False
        return (position - self.point.position.bounds(prompt_len)[0]) % self.point.stride != 0


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
        self._streams: dict[str, Stream] = {}

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

    def open(self, opened: Open) -> Stream:
        """Take up one of its streams."""
        stream = Stream(self, opened, self.captures[opened.point], self._feeds[opened.point])
        self._streams[opened.point] = stream
        return stream

    def take(
        self, stream: Stream, positions: Sequence[int], token_ids: Sequence[int], vectors: Sequence[Any], at: float
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
                elif not feed.skips(position, stream.opened.prompt_len):
                    self._send(stream, feed, position, row, at)
                feed.ended = token_id == feed.stop_token

    def _send(self, stream: Stream, feed: _Feed, position: int, row: Sequence[Any], at: float) -> None:
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
        point = next((feed.point for feeds in self._feeds.values() for feed in feeds if feed.point.name == name), None)
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
        feeds: the points that read it.
    """

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
        """Whether every wanted row of so many computed positions has come; never where their number is not known.

        An engine that goes on for a moment may give the last token a row as well.
        """
        if computed is None:
            return False
        opened = self.opened
        return self.rows >= len(self.capture.positions(opened.cached_prefix, computed, opened.prompt_len))
