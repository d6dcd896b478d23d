"""What the tracker knows of running requests and of their streams, in arrays that machine code reads and writes too.

A request has a place as long as it runs, a stream lies at its request's place in the column of its point. Coming and
going cost what one request costs, however many others there are; a step is arithmetic on whole columns.

Which tokens a step computed is only looked at when a request is computed again. So steps are written down as they are,
and sorted by request when somebody asks, or when there are many: by then most of them are of requests that are gone.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from undercurrent.capture.points import CapturePoint, spans_of

LOG_STEPS = 256
"""Steps that are written down before they are sorted."""

NUMBER, START, STOP, STEP, EMITTED, LAST, ENDED, WATCH_FROM, WATCH_TO, BASE = range(10)
FIELDS = 10
"""Of a stream: its number (0 for none); the positions that its point wants, as a range; rows in step frames; last
position in one (-1); the position of the token that ended it (-1); where such a token is looked for; where its last
rows are kept (-1)."""

DONE, SERIAL = range(2)
"""Of a request: positions below `DONE` were considered; `SERIAL` is never used twice, and 0 where there is none."""

NEXT_LANE, OPENED = range(2)
"""Counters: the number that the next new lane gets, and how many requests were opened."""

_CELLS = struct.Struct(f"={FIELDS}q")
_UNKNOWN = (-1).to_bytes(4, sys.byteorder, signed=True)
_FIRST = 64

Words = npt.NDArray[np.int64]


class Column:
    """The streams of one point.

    Args:
        point: whose.
        places: that there are.
        text: what its streams' first frames say of the point.

    Attributes:
        spans: `points.spans_of` of the point, which remembers the last lengths of prompts.
        cells: [places, FIELDS].
        words: the same memory, one after the other: NumPy takes several times as long to look at one of them.
        streams: by place.
        lane: number and segments of its last frame, where that was the only one of its step.
        segments: streams and rows of that frame, uint32 [2 * places].
    """

    def __init__(self, point: CapturePoint, places: int, text: str) -> None:
        self.point = point
        self.text = text
        self.spans = lru_cache(maxsize=1024)(partial(spans_of, point))
        self.streams: dict[int, Stream] = {}
        self._hold(_no_streams(places))
        self.lane: Words = np.zeros(2, np.int64)
        self.segments: npt.NDArray[np.uint32] = np.zeros(2 * places, np.uint32)

    def grow(self, places: int) -> None:
        """Make room for streams at so many places."""
        more = places - len(self.cells)
        self._hold(np.concatenate([self.cells, _no_streams(more)]))
        self.segments = np.concatenate([self.segments, np.zeros(2 * more, np.uint32)])

    def _hold(self, cells: Words) -> None:
        self.cells = cells
        self._bytes = cells.data.cast("B")
        self.words = self._bytes.cast("q")

    def open(self, number: int, place: int, wanted: range, watched: range, ended_at: int) -> Stream:
        """Return a new stream.

        Args:
            number: of the stream in its ring.
            place: of its request.
            wanted: all positions that its point wants, however long the request becomes.
            watched: positions at which its stop token would end it.
            ended_at: position at which one already has, -1 for none.
        """
        _CELLS.pack_into(
            self._bytes, _CELLS.size * place,
            number, wanted.start, wanted.stop, wanted.step, 0, -1, ended_at, watched.start, watched.stop, -1,
        )  # fmt: skip
        stream = self.streams[place] = Stream(number, self.point, self, place)
        return stream

    def close(self, place: int) -> None:
        """Forget the stream at a place."""
        del self.streams[place]
        self.words[FIELDS * place + NUMBER] = 0


def _no_streams(places: int) -> Words:
    cells: Words = np.zeros((places, FIELDS), np.int64)
    cells[:, STEP] = 1
    return cells


@dataclass(slots=True, eq=False)
class Stream:
    """One request at one point, and what became of its rows so far.

    Args:
        number: of the stream in its ring.
        point: where it captures.
        column: where its numbers stand.
        place: in the column.
        dropped: rows declared lost.
        is_open: its first frame is written and its last is not.
    """

    number: int
    point: CapturePoint
    column: Column
    place: int
    dropped: int = 0
    is_open: bool = False

    @property
    def emitted(self) -> int:
        """Rows in step frames."""
        return self.column.words[FIELDS * self.place + EMITTED]

    @emitted.setter
    def emitted(self, rows: int) -> None:
        self.column.words[FIELDS * self.place + EMITTED] = rows

    @property
    def last_pos(self) -> int:
        """Last position in a step frame, -1 for none."""
        return self.column.words[FIELDS * self.place + LAST]

    @last_pos.setter
    def last_pos(self, position: int) -> None:
        self.column.words[FIELDS * self.place + LAST] = position

    @property
    def ended_at(self) -> int:
        """Position of the stop token that ended it, -1 where none has."""
        return self.column.words[FIELDS * self.place + ENDED]

    @ended_at.setter
    def ended_at(self, position: int) -> None:
        self.column.words[FIELDS * self.place + ENDED] = position

    @property
    def tail_base(self) -> int:
        """Where its last rows are kept, -1 where its point has no tail."""
        return self.column.words[FIELDS * self.place + BASE]

    @tail_base.setter
    def tail_base(self, base: int) -> None:
        self.column.words[FIELDS * self.place + BASE] = base


@dataclass(slots=True, eq=False)
class Request:
    """One engine request with an order.

    Args:
        engine_id: the engine's id of it.
        prompt_len: tokens of its prompt.
        streams: one per point that it wants.
        key: (request_id, attempt, index).
        first: position that `history` begins with: the first that is computed.
        table: where its numbers stand.
        place: in the table.
        slot: where its length is confirmed (see `lengths`), -1 where nobody does.
        prompt_ids: token ids of its prompt, empty where they are not known.
        history: input token ids from position `first` on, int32 as bytes; what `Table.log` holds is still missing.
    """

    engine_id: str
    prompt_len: int
    streams: tuple[Stream, ...]
    key: tuple[str, int, int]
    first: int
    table: Table
    place: int
    slot: int = -1
    prompt_ids: Sequence[int] = ()
    history: bytearray = field(default_factory=bytearray)

    @property
    def done(self) -> int:
        """Positions below this were considered; a preempted request that computes them again emits nothing."""
        return self.table.words[2 * self.place + DONE]

    @done.setter
    def done(self, position: int) -> None:
        self.table.words[2 * self.place + DONE] = position

    def remember(self, start: int, token_ids: bytes) -> None:
        """Take note of what was computed from position `start` on; what is known already is not compared here.

        Args:
            start: position of the first token.
            token_ids: int32 [n], raw.
        """
        known = self.first + len(self.history) // 4
        if start != known:
            if start > known:
                self.history += _UNKNOWN * (start - known)
            token_ids = token_ids[4 * max(0, known - start) :]
        self.history += token_ids

    def differs_at(self, start: int, token_ids: npt.NDArray[np.int32]) -> int:
        """Return the first position from `start` on that was computed of another token before, -1 for none."""
        low = max(start, self.first)
        before = np.frombuffer(self.history, np.int32)[low - self.first :]
        again = token_ids[low - start :]
        count = min(len(before), len(again))
        different = np.flatnonzero(before[:count] != again[:count])
        return low + int(different[0]) if len(different) else -1

    def rewind(self, position: int) -> None:
        """Forget everything from a position on, the end of a stream by a token behind it included."""
        for stream in self.streams:
            if stream.ended_at >= position:
                stream.ended_at = -1
        del self.history[max(0, 4 * (position - self.first)) :]
        self.done = min(self.done, position)


class Table:
    """See the module.

    Attributes:
        requests: [places, 2], see `DONE`.
        words: the same memory, one after the other.
        counters: see `NEXT_LANE`.
        by_id: place of each request, by the engine's id.
        columns: by point.
        log: steps that are not sorted yet, as bytes: number of slots, place of each (-1: none of ours), rows of each,
            and the input token ids of those rows; all int32.
        version: grows whenever arrays are replaced.
    """

    def __init__(self) -> None:
        self._hold(np.zeros((_FIRST, 2), np.int64))
        self.counters: Words = np.zeros(2, np.int64)
        self.by_id: dict[str, int] = {}
        self.columns: dict[str, Column] = {}
        self.log: list[bytes] = []
        self.version = 0
        self._opened = 0
        self._owners: list[Request | None] = [None] * _FIRST
        self._free = list(range(_FIRST - 1, -1, -1))
        self._since: Words = np.zeros(_FIRST, np.int64)  # steps of the log that are of who had the place before

    def _hold(self, requests: Words) -> None:
        self.requests = requests
        self.words = requests.data.cast("B").cast("q")

    def get(self, engine_id: str) -> Request | None:
        """Return a request, None where there is none of that id."""
        place = self.by_id.get(engine_id)
        return None if place is None else self._owners[place]

    def all(self) -> list[Request]:
        """Return all requests, in the order in which they came."""
        return [owner for owner in map(self._owners.__getitem__, self.by_id.values()) if owner is not None]

    def at(self, place: int) -> Request:
        """Return the request at a place."""
        owner = self._owners[place]
        assert owner is not None  # noqa: S101 - the caller's choice
        return owner

    def use(self, points: Mapping[str, CapturePoint], texts: Mapping[str, str]) -> None:
        """Have a column for each of these points, in this order; those of points that stay stay.

        Args:
            points: by name.
            texts: what their streams' first frames say of each.
        """
        before, places = self.columns, len(self.requests)
        kept = {name: before[name] for name, point in points.items() if name in before and before[name].point is point}
        self.columns = {name: kept.get(name) or Column(point, places, texts[name]) for name, point in points.items()}
        self.version += 1

    def take_place(self) -> int:
        """Return a place that nobody has."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def add(self, request: Request) -> None:
        """Take a new request in at its place; nothing of it is computed but its cached prefix."""
        self._opened += 1
        self.counters[OPENED] = self._opened
        self.words[2 * request.place + DONE] = request.first
        self.words[2 * request.place + SERIAL] = self._opened
        self._owners[request.place] = request
        self._since[request.place] = len(self.log)
        self.by_id[request.engine_id] = request.place

    def remove(self, request: Request) -> None:
        """Forget a request and its streams."""
        place = request.place
        for stream in request.streams:
            stream.column.close(place)
        self.words[2 * place + SERIAL] = 0
        self._owners[place] = None
        self._since[place] = LOG_STEPS
        self._free.append(place)
        del self.by_id[request.engine_id]

    def next_lane(self) -> int:
        """Return a number that no lane has."""
        number = int(self.counters[NEXT_LANE])
        self.counters[NEXT_LANE] = number + 1
        return number

    def places_of(self, engine_ids: Sequence[str]) -> Words:
        """Return the place of each of some requests, -1 where it is none of ours [n]."""
        get = self.by_id.get
        return np.array([get(engine_id, -1) for engine_id in engine_ids], np.int64)

    def sort_log(self) -> None:
        """Give each request the tokens that the log holds of it."""
        if self.log and self.by_id:
            self._sort([np.frombuffer(entry, np.int32) for entry in self.log])
        self.log.clear()
        self._since[:] = 0

    def _sort(self, steps: Sequence[npt.NDArray[np.int32]]) -> None:
        slots = [int(step[0]) for step in steps]
        places = np.concatenate([step[1 : 1 + n] for step, n in zip(steps, slots, strict=True)])
        counts = np.concatenate([step[1 + n : 1 + 2 * n] for step, n in zip(steps, slots, strict=True)])
        token_ids = np.concatenate([step[1 + 2 * n :] for step, n in zip(steps, slots, strict=True)])
        gone = (places < 0) | (np.repeat(np.arange(len(steps)), slots) < self._since[places])
        nobody = len(self._owners)
        places[gone] = nobody
        # NumPy sorts so small numbers in one pass, without comparing them.
        owners = np.repeat(places.astype(np.uint16) if nobody < 1 << 16 else places, counts)
        here = np.flatnonzero(owners != nobody)
        owners = owners[here]
        sorted_ids = token_ids[here[np.argsort(owners, kind="stable")]].tobytes()
        first = 0
        for place, rows in enumerate(np.bincount(owners).tolist()):
            if rows:
                self.at(place).history += sorted_ids[4 * first : 4 * (first + rows)]
                first += rows

    def _grow(self) -> None:
        before = len(self.requests)
        self._hold(np.concatenate([self.requests, np.zeros((before, 2), np.int64)]))
        self._owners += [None] * before
        self._since = np.concatenate([self._since, np.zeros(before, np.int64)])
        self._free += range(2 * before - 1, before - 1, -1)
        for column in self.columns.values():
            column.grow(2 * before)
        self.version += 1
