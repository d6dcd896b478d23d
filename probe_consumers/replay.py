"""Replay: the host's own core over a bounded part of a topic. No group, no commits, no aborts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from probe_consumers.bound import Bound, Clock, set_fingerprint
from probe_consumers.runner import BindingRunner
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Incoming
from undercurrent.protocol.host_position import Resume
from undercurrent.protocol.messages import ProbeVerdict, StreamStarted, VerdictKind
from undercurrent.protocol.streams import StreamId, StreamMessage, stream_id

REPLAY_SERVICE = "replay"
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


class Replay:
    """Runs bindings over spans of the partitions of one point.

    Args:
        point: the extraction point.
        bounds: the bindings.
        spans: by partition.
        clock: tells the time that verdicts carry.
    """

    def __init__(self, point: str, bounds: Sequence[Bound], spans: Mapping[int, Span], clock: Clock) -> None:
        self._spans = dict(spans)
        self._host = ProbeHost(
            point,
            set_fingerprint(bounds),
            BindingRunner(bounds, REPLAY_SERVICE, clock),
            _NO_LIMIT_US,
            contiguous=False,  # a replay of some requests leaves the others' records out
        )
        self._host.assign(spans)
        for number, span in spans.items():
            self._host.begin(number, Resume(offset=span.start, emitted_up_to=span.start))
        self._seen: set[StreamId] = set()
        self._before: dict[StreamId, int] = {}
        self.dead_letters: list[dict[str, object]] = []

    def feed(self, records: Sequence[Incoming]) -> tuple[ProbeVerdict, ...]:
        """Take records, each partition's in order, and return what the probes say of them."""
        self._host.records(records, now_us=0)
        transaction = self._host.transaction()
        for letter in transaction.dead_letters:
            self.dead_letters.append(
                {"partition": letter.partition, "offset": letter.offset, "cause": letter.cause, "detail": letter.detail}
            )
        for item in records:
            self._note(item)
        return transaction.verdicts

    def edges(self) -> Edges:
        """Return the streams that the range cuts; called at its end."""
        unfinished = {
            stream.id: stream.start_offset for number in self._spans for stream in self._host.open_streams(number)
        }
        return Edges(self._before, unfinished)

    def _note(self, item: Incoming) -> None:
        message = item.message
        if not isinstance(message, StreamMessage):
            return
        name = stream_id(message)
        if isinstance(message, StreamStarted):
            self._seen.add(name)
        # At the very start of a partition nothing lies before: a start that is missing there is a difference.
        elif name not in self._seen and self._spans[item.partition].start > 0:
            self._before.setdefault(name, item.partition)


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
