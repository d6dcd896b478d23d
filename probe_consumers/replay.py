"""Replay: the host's own core over a bounded part of a topic. No group, no commits, no aborts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from probe_consumers.bound import Bound, Clock, set_fingerprint
from probe_consumers.runner import BindingRunner
from probe_consumers.versions import Versions
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Incoming
from undercurrent.protocol.host_position import Resume
from undercurrent.protocol.host_states import NEVER_BYTES, Keeping
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
    """

    started_before: dict[StreamId, int] = field(default_factory=dict)
    unfinished: dict[StreamId, int] = field(default_factory=dict)


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
        partition: where it lies.
        offset: where in the partition.
        stream: whose it is, None where it cannot be read or is of no stream.
        cause: a bounded word; see `Stray`, and `poison` for what cannot be read.
        detail: in words.
        is_end: it is the end of a stream that is not open: no fault, unless its start lies before the range.
    """

    partition: int
    offset: int
    stream: StreamId | None
    cause: str
    detail: str = ""
    is_end: bool = False


class Replay:
    """Runs bindings over spans of the partitions of one point.

    What it holds does not grow with the spans: only what is open, and what was said since the last `outputs`.

    Args:
        point: the extraction point.
        bounds: the bindings.
        spans: by partition.
        clock: tells the time that verdicts carry.
        marks: by partition, where an earlier replay of the same spans has come to; from the start where there is none.
        versions: says which versions of the bindings run on a stream; by default they themselves.
        max_replay_bytes: of the live host, whose probes end there that cannot be written down; None for no limit.
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
    ) -> None:
        self._spans = dict(spans)
        self._host = ProbeHost(
            point,
            set_fingerprint(bounds),
            BindingRunner(bounds, REPLAY_SERVICE, clock, versions),
            _NO_LIMIT_US,
            contiguous=False,  # a replay of some requests leaves the others' records out
            keeping=None if max_replay_bytes is None else Keeping(NEVER_BYTES, max_replay_bytes),
        )
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

    def outputs(self) -> tuple[ProbeVerdict, ...]:
        """Return what the probes have said since the last call.

        A replay that goes on from a mark says the same behind it as one that was not interrupted, if both are asked at
        the same offsets, the mark's position among them.
        """
        transaction = self._host.transaction()
        self._left_out += [
            LeftOut(letter.partition, letter.offset, letter.stream, letter.cause, letter.detail)
            for letter in transaction.dead_letters
        ]
        for number in self._known:
            self._known[number] = {stream.id for stream in self._host.open_streams(number)}
        return transaction.verdicts

    def take_left_out(self) -> list[LeftOut]:
        """Return, and forget, the records that no stream took, as of the last outputs."""
        found, self._left_out = self._left_out, []
        return sorted(found, key=lambda item: (item.partition, item.offset))

    def mark(self, partition: int) -> Mark:
        """Return how far a partition has come, as of the last outputs."""
        low, position = self._host.mark(partition)
        return Mark(low, position)

    def unfinished(self) -> dict[StreamId, int]:
        """Return the streams that are open, each with its partition."""
        return {stream.id: number for number in self._spans for stream in self._host.open_streams(number)}

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
        return [item for item in self._told if not item.is_end]

    def edges(self) -> Edges:
        """Return the streams that the range cuts, of all that was fed; called at its end."""
        unfinished = self.unfinished()
        return Edges(cut_streams(self._told, self._spans, self._spoken | unfinished.keys()), unfinished)

    def _note_end(self, item: Incoming, name: StreamId) -> None:
        if name not in self._known[item.partition]:
            ended = LeftOut(item.partition, item.offset, name, NO_OPEN_STREAM, is_end=True)
            self._left_out.append(ended)


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
    return {
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
    live: Iterable[ProbeVerdict], replayed: Iterable[ProbeVerdict], edges: Edges, spans: Mapping[int, Span]
) -> tuple[list[ProbeVerdict], list[ProbeVerdict]]:
    """Return those live and replayed verdicts that speak of the same streams, whole.

    Args:
        live: of the live run, of the same bindings.
        replayed: of the replay.
        edges: what the range cuts.
        spans: the range.
    """
    cut = set(edges.started_before)
    mine = [verdict for verdict in replayed if _name(verdict) not in cut]
    in_range = [verdict for verdict in live if _name(verdict) not in cut and _inside(verdict, spans)]
    ended_live = {_name(verdict) for verdict in in_range if verdict.kind in (VerdictKind.RESULT, VerdictKind.ERROR)}
    # Open at the range's end, and in the live run too, as far as the range goes.
    cut |= set(edges.unfinished) - ended_live
    known = {_name(verdict) for verdict in mine}
    scored = {_name(verdict) for verdict in in_range if verdict.kind is VerdictKind.WATERMARK}

    def stays(verdict: ProbeVerdict) -> bool:
        name = _name(verdict)
        if name in cut:
            return False
        # Its records lie before the range and only its end, which another record brought about, lies inside.
        return name in known or name in scored or spans[verdict.source_partition].start == 0

    return [verdict for verdict in in_range if stays(verdict)], [item for item in mine if _name(item) not in cut]


def _name(verdict: ProbeVerdict) -> StreamId:
    return StreamId(verdict.request_id, verdict.attempt, verdict.index)


def _inside(verdict: ProbeVerdict, spans: Mapping[int, Span]) -> bool:
    span = spans.get(verdict.source_partition)
    return span is not None and span.start <= verdict.source_offset < span.end
