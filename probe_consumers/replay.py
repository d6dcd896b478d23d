"""Replay: the host's own core over a bounded part of a topic. No group, no commits, no aborts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from probe_consumers.bound import Bound, Clock, set_fingerprint
from probe_consumers.cores import core_of
from probe_consumers.inputs import Inputs
from probe_consumers.replay_choosing import Choosing
from probe_consumers.runner import BindingRunner
from probe_consumers.versions import Versions
from undercurrent.protocol.host_events import DeadLetter, Incoming
from undercurrent.protocol.host_position import Resume
from undercurrent.protocol.host_states import NEVER_BYTES, Keeping
from undercurrent.protocol.joining_host import JoiningHost
from undercurrent.protocol.lanes import Lanes
from undercurrent.protocol.messages import (
    ActivationBlock,
    ProbeVerdict,
    StreamEnded,
    StreamStarted,
    VerdictKind,
)
from undercurrent.protocol.strands import Stretch
from undercurrent.protocol.streams import StreamId, stream_id

REPLAY_SERVICE = "replay"
NO_OPEN_STREAM = "no_open_stream"
HALF = "half_in_range"
# A record's age has no meaning here; what a live host would have aborted is recorded as such.
_NO_LIMIT_US = 2**62


@dataclass(frozen=True, slots=True)
class Span:
    """A part of one partition.

    Args:
        start: first offset.
        end: offset after the last one.
    """

    start: int
    end: int


@dataclass(slots=True)
class Edges:
    """Streams that the range cuts: named, and not compared.

    Args:
        started_before: their StreamStarted lies before the range.
        unfinished: they are open at its end.
        elsewhere: of joined streams, those that are open at the end of another point than the first, whose record a
            verdict does not name.
    """

    started_before: dict[StreamId, int] = field(default_factory=dict)
    unfinished: dict[StreamId, int] = field(default_factory=dict)
    elsewhere: set[StreamId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a partition has come.

    Args:
        low: offset from which a reader comes to the same open streams.
        position: first offset whose outputs are not written down.
    """

    low: int
    position: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A record that no stream takes.

    Args:
        partition: where it lies; the lane, where points are joined.
        offset: where in the partition.
        stream: whose it is, None where it cannot be read or is of no stream.
        cause: a bounded word; see `Stray`, `poison` for what cannot be read, and `HALF` for what would show that a
            stream is missing, if that did not lie before the range.
        detail: in words.
        is_end: it is the end of a stream that is not open: no fault, unless its start lies before the range.
    """

    partition: int
    offset: int
    stream: StreamId | None
    cause: str
    detail: str = ""
    is_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What is to be known of a replay that joins points.

    Args:
        inputs: what it reads.
        begins_us: when the range's first record was appended, by lane, where there are records before the range; None
            where it has none.
        wanted: the requests that are asked for; None for all.
    """

    inputs: Inputs
    begins_us: Mapping[int, int | None] = field(default_factory=dict)
    wanted: frozenset[str] | None = None


class Replay:
    """Runs bindings over spans of the partitions of one point, or of the lanes of several that are joined.

    What it holds does not grow with the spans: only what is open, and what was said since the last `outputs`.

    Args:
        point: the extraction point.
        bounds: the bindings.
        spans: by partition, or lane.
        clock: tells the time that verdicts carry.
        marks: by partition, where an earlier replay of the same spans has come to; from the start where there is none.
        versions: says which versions of the bindings run on a stream; by default they themselves.
        max_replay_bytes: of the live host, whose probes end there that cannot be written down; None for no limit.
        joining: where points are joined. All lanes of a partition number belong to one replay.
    """

    def __init__(
        self,
        point: str,
        bounds: Sequence[Bound],
        spans: Mapping[int, Span],
        clock: Clock,
        marks: Mapping[int, Mark] | None = None,
        versions: Versions | None = None,
        max_replay_bytes: int | None = None,
        joining: Joining | None = None,
    ) -> None:
        self._spans = dict(spans)
        self._joining = joining
        inputs = Inputs((point,), (point,), (point,)) if joining is None else joining.inputs
        runner = BindingRunner(bounds, REPLAY_SERVICE, clock, versions)
        self._choosing: Choosing | None = None
        if joining is not None:
            self._choosing = Choosing(runner, inputs.lanes, joining.begins_us, joining.wanted)
        self._host = core_of(
            inputs,
            set_fingerprint(bounds),
            self._choosing or runner,
            _NO_LIMIT_US,
            contiguous=False,  # a replay of some requests leaves the others' records out
            keeping=None if max_replay_bytes is None else Keeping(NEVER_BYTES, max_replay_bytes),
        )
        self._others: dict[tuple[int, StreamId, int], tuple[int, ...]] = {}
        self._host.assign(spans)
        self._marks = {
            number: (marks or {}).get(number, Mark(span.start, span.start)) for number, span in spans.items()
        }
        for number, mark in self._marks.items():
            self._host.begin(number, Resume(offset=mark.low, emitted_up_to=mark.position))
        # Open streams, and those that closed since the last outputs: by partition.
        self._known: dict[int, set[StreamId]] = {number: set() for number in spans}
        self._left_out: list[LeftOut] = []
        self._spoken: set[StreamId] = set()
        self._told: list[LeftOut] = []

    def take(self, records: Sequence[Incoming | Stretch]) -> None:
        """Take records, each partition's in order; what lies below a mark only rebuilds what is open."""
        singles = (item for item in records if not isinstance(item, Stretch))
        for item in [item for item in singles if type(item.message) is not ActivationBlock]:
            message = item.message
            if isinstance(message, StreamStarted):
                self._known[item.partition].add(stream_id(message))
            elif isinstance(message, StreamEnded) and item.offset >= self._marks[item.partition].position:
                self._note_end(item, stream_id(message))
        self._host.records(records, now_us=0)

    @property
    def ahead(self) -> frozenset[int]:
        """Lanes to be read on with only after others, since too much of theirs waits for them."""
        return self._host.ahead

    def come_to(self, marks: Mapping[int, Mark]) -> None:
        """Take note that all that lies below the marks has been taken, whatever of it is still there."""
        if isinstance(self._host, JoiningHost):
            for number, mark in marks.items():
                self._host.pass_over(number, mark.position)

    def outputs(self) -> tuple[ProbeVerdict, ...]:
        """Return what the probes have said since the last call.

        A replay that goes on from a mark says the same behind it as one that was not interrupted, if both are asked at
        the same offsets, the mark's position among them.
        """
        transaction = self._host.transaction()
        self._left_out += [
            LeftOut(letter.partition, letter.offset, letter.stream, letter.cause, letter.detail)
            for letter in transaction.dead_letters
            if self._asks_for(letter)
        ]
        for number in self._known:
            self._known[number] = {stream.id for stream in self._host.open_streams(number)}
        if self._choosing is None:
            return transaction.verdicts
        self._others = self._choosing.take_others()
        self._left_out += [LeftOut(*half, cause=HALF) for half in self._choosing.take_halves()]
        # Which request is told first depends on how lanes were cut into batches.
        return tuple(sorted(transaction.verdicts, key=lambda item: (item.source_offset, _name(item))))

    def other_offsets(self, verdict: ProbeVerdict) -> tuple[int, ...] | None:
        """Return the other points' records that one of the last outputs follows from; None where nothing is joined."""
        return self._others.get((verdict.source_partition, _name(verdict), verdict.source_offset))

    def take_left_out(self) -> list[LeftOut]:
        """Return, and forget, the records that no stream took, as of the last outputs."""
        found, self._left_out = self._left_out, []
        # Where requests are named, the others of joined streams are read too: a log's records tell how far it has come.
        found = [item for item in found if item.stream is None or self._is_wanted(item.stream)]
        # Of a record that no stream takes there is one row, in its place; one record may cut many requests in half.
        return sorted(found, key=lambda item: (item.partition, item.offset, *_half(item)))

    def _asks_for(self, letter: DeadLetter) -> bool:
        """Whether a record that perhaps nobody can read may be of a request that is asked for."""
        wanted, key = None if self._joining is None else self._joining.wanted, getattr(letter.raw, "key", None)
        return wanted is None or not key or key.decode(errors="replace") in wanted

    def mark(self, partition: int) -> Mark:
        """Return how far a partition has come, as of the last outputs."""
        low, position = self._host.mark(partition)
        return Mark(low, position)

    def unfinished(self) -> dict[StreamId, int]:
        """Return the streams that are open, each with its partition; joined ones, with the last lane where they are."""
        if not isinstance(self._host, JoiningHost):
            return {stream.id: number for number in self._spans for stream in self._host.open_streams(number)}
        found = {name: lane for lane in sorted(self._spans) for name in self._host.unfinished(lane)}
        halves = {half.stream for half in self._halves()}
        return {name: lane for name, lane in found.items() if name not in halves and self._is_wanted(name)}

    def end(self) -> None:
        """Take note that nothing more comes."""
        self._left_out += self._halves()

    def _halves(self) -> list[LeftOut]:
        """Return the requests that wait for a start, as of now, that may lie before the range."""
        if not isinstance(self._host, JoiningHost):
            return []
        places = [(lane, span.end) for lane, span in sorted(self._spans.items()) if span.start > 0]
        found = {name: place for place in places for name in self._host.unstarted(place[0])}
        return [LeftOut(*place, name, HALF) for name, place in sorted(found.items())]

    def _is_wanted(self, name: StreamId) -> bool:
        wanted = None if self._joining is None else self._joining.wanted
        return wanted is None or name.request_id in wanted

    # --- all at once, in memory

    def feed(self, records: Sequence[Incoming]) -> tuple[ProbeVerdict, ...]:
        """Take records and return what the probes say of them; what `edges` needs is kept."""
        self.take(records)
        verdicts = self.outputs()
        self._spoken.update(_name(verdict) for verdict in verdicts)
        self._told += self.take_left_out()
        return verdicts

    @property
    def dead_letters(self) -> list[LeftOut]:
        """Records that no stream took, of all that was fed."""
        return [item for item in self._told if not item.is_end and item.cause != HALF]

    def edges(self) -> Edges:
        """Return the streams that the range cuts, of all that was fed; called at its end."""
        self.end()
        self._told += self.take_left_out()
        unfinished = self.unfinished()
        cut = cut_streams(self._told, self._spans, self._spoken | unfinished.keys())
        lanes = None if self._joining is None else self._joining.inputs.lanes
        elsewhere = set() if lanes is None else {name for name, lane in unfinished.items() if lanes.side(lane)}
        return Edges(cut, unfinished, elsewhere)

    def _note_end(self, item: Incoming, name: StreamId) -> None:
        if name not in self._known[item.partition]:
            ended = LeftOut(item.partition, item.offset, name, NO_OPEN_STREAM, is_end=True)
            self._left_out.append(ended)


def _half(item: LeftOut) -> tuple[bool, StreamId | None]:
    return (True, item.stream) if item.cause == HALF else (False, None)


def cut_streams(
    left_out: Collection[LeftOut], spans: Mapping[int, Span], spoken: Collection[StreamId]
) -> dict[StreamId, int]:
    """Return the streams whose start lies before the range, each with its partition.

    Args:
        left_out: of the whole range.
        spans: the range.
        spoken: streams that started in it. What comes late of those is left out too, and they are not cut.
    """
    refused = {item.stream for item in left_out if item.cause == "stale_attempt"}  # they started, and nobody looked
    halves = {item.stream: item.partition for item in left_out if item.stream is not None and item.cause == HALF}
    return halves | {
        item.stream: item.partition
        for item in left_out
        # At the very start of a partition nothing lies before: a start that is missing there is a difference.
        if item.stream is not None
        and item.cause == NO_OPEN_STREAM
        and spans[item.partition].start > 0
        and item.stream not in spoken
        and item.stream not in refused
    }


def comparable(
    live: Iterable[ProbeVerdict],
    replayed: Iterable[ProbeVerdict],
    edges: Edges,
    spans: Mapping[int, Span],
    lanes: Lanes | None = None,
) -> tuple[list[ProbeVerdict], list[ProbeVerdict]]:
    """Return those live and replayed verdicts that speak of the same streams, whole.

    Args:
        live: of the live run, of the same bindings.
        replayed: of the replay.
        edges: what the range cuts.
        spans: the range.
        lanes: where points are joined.
    """
    cut = set(edges.started_before)
    mine = [verdict for verdict in replayed if _name(verdict) not in cut]
    in_range = [verdict for verdict in live if _name(verdict) not in cut and _inside(verdict, spans)]
    ended_live = {_name(verdict) for verdict in in_range if verdict.kind in (VerdictKind.RESULT, VerdictKind.ERROR)}
    # Open at the range's end, and in the live run too, as far as the range goes.
    cut |= (set(edges.unfinished) - ended_live) | edges.elsewhere
    known = {_name(verdict) for verdict in mine}
    scored = {_name(verdict) for verdict in in_range if verdict.kind is VerdictKind.WATERMARK}

    def stays(verdict: ProbeVerdict) -> bool:
        name = _name(verdict)
        if name in cut:
            return False
        # Its records lie before the range and only its end, which another record brought about, lies inside.
        if name in known or name in scored:
            return True
        mine = (verdict.source_partition,) if lanes is None else lanes.of(verdict.source_partition)
        # Or only what shows that it lacks a point lies inside, and its start at another one behind the range.
        half = lanes is not None and not (verdict.complete or verdict.scored or verdict.kind is VerdictKind.ERROR)
        return not half and all(spans[lane].start == 0 for lane in mine)

    return [verdict for verdict in in_range if stays(verdict)], [item for item in mine if _name(item) not in cut]


def _name(verdict: ProbeVerdict) -> StreamId:
    return StreamId(verdict.request_id, verdict.attempt, verdict.index)


def _inside(verdict: ProbeVerdict, spans: Mapping[int, Span]) -> bool:
    span = spans.get(verdict.source_partition)
    return span is not None and span.start <= verdict.source_offset < span.end
