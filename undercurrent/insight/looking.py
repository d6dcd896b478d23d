"""A pipeline's state from its topics and committed offsets, within bounds whatever the size of the topics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from undercurrent.codec import BlockDecoder
from undercurrent.errors import CodecError, ProtocolError
from undercurrent.insight.health import GroupState, PartitionState, PointState, Status
from undercurrent.insight.reading import Pipeline, Span
from undercurrent.kafka.group_admin import Group, GroupAdmin
from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.dead_letters import Place, origin
from undercurrent.protocol.epochs import Position, decode_metadata
from undercurrent.protocol.generations import GenerationsReader, RequestState, Ruling
from undercurrent.protocol.host_position import HostMetadata
from undercurrent.protocol.messages import (
    Accepted,
    ActivationBlock,
    ControlAck,
    EndReason,
    EngineStarted,
    GenerationEvent,
    Message,
    ProbeHeartbeat,
    Released,
    StreamEnded,
)
from undercurrent.topics import DLQ_SUFFIX, JOIN, points_of

_MOST_OFFSETS = 5_000
_MOST_BLOCKS = 1_000
_OWNER_OFFSETS = 200
"""Of one partition, at most so many records are looked at; activations are large."""
_DELAY_RECORDS = 20
_BEATS_S = 30.0
_BROKEN = (EndReason.LOST, EndReason.CAPTURE_ERROR)

Committed = Mapping[Partition, tuple[int, str | None]]


class Looker:
    """Looks at a pipeline, again and again.

    Args:
        pipeline: the topics.
        window_s: how far back is looked for what happened lately.
    """

    def __init__(self, pipeline: Pipeline, window_s: float) -> None:
        self._pipeline = pipeline
        self._window_s = window_s
        self._groups = GroupAdmin(pipeline.settings)
        self._blocks = BlockDecoder(pipeline.codec, lambda _: None)

    def look(self) -> Status:
        """Return the pipeline's state.

        Raises:
            UnreachableError: no broker answers in time.
        """
        pipeline, now_ms = self._pipeline, time.time_ns() // 1_000_000
        names = [n.removeprefix(f"{pipeline.prefix}.") for n in pipeline.topics]
        ends = pipeline.ends(pipeline.partitions(*names))
        status = Status(prefix=pipeline.prefix, at_ms=now_ms, window_s=self._window_s)
        since_ms = now_ms - int(self._window_s * 1000)
        prompts = pipeline.partitions("prompts")
        status.prompts = sum(ends[where] for where in prompts)
        beats = self._beats(ends, now_ms)
        for group in self._groups.describe(self._groups.names(f"{pipeline.prefix}.")).values():
            self._group(status, group, ends, beats)
        self._finals(status, ends, since_ms)
        status.points = [self._point(point, ends, since_ms) for point in pipeline.points]
        self._acks(status, ends, since_ms)
        status.letters = self._letters(ends, since_ms)
        return status

    # --- groups

    def _group(self, status: Status, group: Group, ends: Mapping[Partition, int], beats: list[ProbeHeartbeat]) -> None:
        prompts = self._pipeline.partitions("prompts")
        committed = self._pipeline.lookup.committed(group.name, prompts) if prompts else {}
        if committed or any(where in group.owners for where in prompts):
            status.engines.append(self._engines(group, committed, ends, status.at_ms))
        for point in self._pipeline.points:
            partitions = self._pipeline.partitions(f"activations.{point}")
            held = self._pipeline.lookup.committed(group.name, partitions) if _reads(group.name, point) else {}
            if held:
                mine = [beat for beat in beats if beat.service == group.name]
                status.hosts.append(self._hosts(group, partitions, held, ends, mine, status.at_ms))

    def _engines(self, group: Group, committed: Committed, ends: Mapping[Partition, int], now_ms: int) -> GroupState:
        topic = f"{self._pipeline.prefix}.prompts"
        positions = {where: _position(*held) for where, held in committed.items()}
        states, engines = self._open_requests(positions, ends)
        firsts = self._first_records(
            {where: position.offset for where, position in positions.items() if position.offset < ends[where]}
        )
        partitions = []
        for where in self._pipeline.partitions("prompts"):
            position = positions.get(where)
            if position is None:
                partitions.append(PartitionState(number=where.number, end=ends[where], emitted=0, lag=ends[where]))
                continue
            finished = sum(offset < ends[where] for offset in position.finished)
            running = states.get(where.number, [])
            state = PartitionState(
                number=where.number,
                end=ends[where],
                emitted=position.offset,
                lag=max(0, ends[where] - position.offset - finished),
                epoch=position.epoch,
                running=len(running),
                attempts=max((item.attempt for item in running), default=0),
                owner=_engine_of(engines.get(where.number, ""), group, where),
            )
            partitions.append(_with_oldest(state, firsts.get(where), now_ms))
        return GroupState(name=group.name, topic=topic, members=group.members, partitions=tuple(partitions))

    def _open_requests(
        self, positions: Mapping[Partition, Position], ends: Mapping[Partition, int]
    ) -> tuple[dict[int, list[RequestState]], dict[int, str]]:
        """Return, by partition, the requests that are accepted and not over, and the engine that took one last."""
        spans = {}
        for where, position in positions.items():
            log = Partition(f"{self._pipeline.prefix}.generations", where.number)
            if log in ends:
                # A little of what is over too: it says who owns the partition.
                start = max(min(position.read_from, ends[log] - _OWNER_OFFSETS), ends[log] - _MOST_OFFSETS)
                spans[log] = Span(start, ends[log])
        readers: dict[int, GenerationsReader] = {}
        engines: dict[int, str] = {}
        for record, message in self._messages(spans):
            if isinstance(message, Accepted | Released | GenerationEvent):
                engines[record.partition] = message.engine
                reader = readers.setdefault(record.partition, GenerationsReader())
                if reader.apply(message, offset=record.offset) is Ruling.CLOSED and reader.is_closed(
                    message.request_id
                ):
                    reader.forget(message.request_id)
        return {number: list(reader) for number, reader in readers.items()}, engines

    def _hosts(
        self,
        group: Group,
        partitions: list[Partition],
        held: Committed,
        ends: Mapping[Partition, int],
        beats: list[ProbeHeartbeat],
        now_ms: int,
    ) -> GroupState:
        latest = {beat.member: beat for beat in beats}.values()
        firsts = self._first_records({where: offset for where, (offset, _) in held.items() if offset < ends[where]})
        states = []
        for where in partitions:
            offset, text = held.get(where, (0, None))
            metadata = HostMetadata.from_text(text)
            emitted = offset if metadata is None else max(offset, metadata.emitted_up_to)
            owner = next((_host(beat) for beat in latest if where.number in beat.partitions), "")
            state = PartitionState(
                number=where.number,
                end=ends[where],
                emitted=emitted,
                lag=max(0, ends[where] - emitted),
                owner=owner or group.owners.get(where, ""),
            )
            # Below `e` the oldest open stream holds the offset; at `e` nothing is open. A group that joins topics reads
            # the last record of each again in any case.
            held_back = offset < emitted - (JOIN in group.name)
            states.append(_with_oldest(state, firsts.get(where) if held_back else None, now_ms))
        return GroupState(
            name=group.name,
            topic=partitions[0].topic,
            members=group.members,
            probes=tuple(sorted({f"{b.probe} {b.mode}" for beat in latest for b in beat.probes})),
            beat_age_s=min(((now_ms - beat.sent_at_us / 1000) / 1000 for beat in latest), default=None),
            lag_s=max((beat.lag_s for beat in latest), default=0.0),
            partitions=tuple(states),
        )

    def _beats(self, ends: Mapping[Partition, int], now_ms: int) -> list[ProbeHeartbeat]:
        verdicts = self._pipeline.partitions("verdicts")
        spans = self._lately(verdicts, ends, now_ms - int(_BEATS_S * 1000))
        found = [
            message for _, message in self._messages(spans) if isinstance(message, ProbeHeartbeat) and message.probes
        ]
        return sorted(found, key=lambda beat: beat.sent_at_us)

    # --- what happened lately

    def _finals(self, status: Status, ends: Mapping[Partition, int], since_ms: int) -> None:
        spans = self._lately(self._pipeline.partitions("generations"), ends, since_ms)
        outcomes: Counter[str] = Counter()
        guards: dict[str, Counter[str]] = {}
        for _, message in self._messages(spans):
            if not isinstance(message, GenerationEvent) or message.outcome is None:
                continue
            outcomes[message.outcome.value] += 1
            # What no engine ran, nothing had to guard.
            for guard in message.guards if message.generated_tokens else ():
                guards.setdefault(guard.probe, Counter())[guard.state.value] += 1
        status.finals, status.guards = dict(outcomes), {probe: dict(states) for probe, states in guards.items()}

    def _point(self, name: str, ends: Mapping[Partition, int], since_ms: int) -> PointState:
        state = PointState(name=name)
        spans = self._lately(self._pipeline.partitions(f"activations.{name}"), ends, since_ms, _MOST_BLOCKS)
        delays: dict[int, list[float]] = {}
        for record, message in self._messages(spans):
            if isinstance(message, ActivationBlock):
                state.records += 1
                delays.setdefault(record.partition, []).append(record.timestamp_ms - message.captured_at_us / 1000)
            elif isinstance(message, StreamEnded):
                state.streams += 1
                state.broken += message.reason in _BROKEN
                state.dropped += sum(message.dropped)
        latest = [delay for found in delays.values() for delay in found[-_DELAY_RECORDS:]]
        state.delay_ms = max(latest, default=None)
        return state

    def _acks(self, status: Status, ends: Mapping[Partition, int], since_ms: int) -> None:
        acks = self._pipeline.partitions("control.acks")
        spans = {where: Span(max(0, ends[where] - _MOST_OFFSETS), ends[where]) for where in acks}
        outcomes: Counter[str] = Counter()
        for record, message in self._messages(self._within(spans)):
            if isinstance(message, ControlAck) and record.timestamp_ms >= since_ms:
                outcomes[message.outcome.value] += 1
            elif isinstance(message, EngineStarted):
                status.names[message.engine] = message.started_at_us
                if message.retired:
                    del status.names[message.engine]
        status.acks = dict(outcomes)

    def _letters(self, ends: Mapping[Partition, int], since_ms: int) -> dict[str, tuple[int, int]]:
        found = {}
        for topic, partitions in self._pipeline.topics.items():
            if not topic.endswith(DLQ_SUFFIX):
                continue
            begins = self._pipeline.lookup.beginning(partitions)
            spans = {where: Span(max(begins[where], ends[where] - _MOST_OFFSETS), ends[where]) for where in partitions}
            # Read, not subtracted: the ends of transactions and the notes of requeues take offsets too.
            times: dict[Place, int] = {}
            for record in self._pipeline.read(spans):
                if (source := origin(record.headers)) is not None:
                    times.setdefault(source, record.timestamp_ms)
            older = sum(span.start - begins[where] for where, span in spans.items())
            found[topic] = (len(times) + older, sum(at_ms >= since_ms for at_ms in times.values()))
        return found

    # --- records

    def _lately(
        self, partitions: list[Partition], ends: Mapping[Partition, int], since_ms: int, most: int = _MOST_OFFSETS
    ) -> dict[Partition, Span]:
        starts = self._pipeline.lookup.at_time(partitions, since_ms)
        return {where: Span(max(starts[where], ends[where] - most), ends[where]) for where in partitions}

    def _first_records(self, offsets: Mapping[Partition, int]) -> dict[Partition, Record]:
        """Return the first record from each offset on."""
        spans = self._within({where: Span(offset, offset + 1) for where, offset in offsets.items()})
        return {record.source: record for record in self._pipeline.read(spans)}

    def _within(self, spans: Mapping[Partition, Span]) -> dict[Partition, Span]:
        """Return the parts that retention has left."""
        begins = self._pipeline.lookup.beginning(spans)
        return {where: Span(max(span.start, begins[where]), span.end) for where, span in spans.items()}

    def _messages(self, spans: Mapping[Partition, Span]) -> list[tuple[Record, Message]]:
        found = []
        for record in self._pipeline.read(self._within(spans)):
            try:
                found.append((record, self._blocks.decode(record.key, record.value)))
            except CodecError:
                continue  # dead-lettered, and counted there
        return found


def _reads(group: str, point: str) -> bool:
    """Whether a group of probe hosts reads a point, by its name: alone, or joined with others."""
    first, *others = points_of(group)
    return first.endswith(f".{point}") or point in others


def _position(offset: int, metadata: str | None) -> Position:
    try:
        return decode_metadata(offset, metadata or "")
    except ProtocolError:
        return Position(offset=offset, epoch=0, read_from=0)


def _with_oldest(state: PartitionState, record: Record | None, now_ms: int) -> PartitionState:
    if record is None:
        return state
    key = (record.key or b"").decode(errors="backslashreplace")
    return replace(state, oldest=key, oldest_age_s=max(0.0, (now_ms - record.timestamp_ms) / 1000))


def _engine_of(engine: str, group: Group, where: Partition) -> str:
    """Return the engine that last wrote of a partition's requests, or where its member is; nobody without a member."""
    member = group.owners.get(where, "")
    return engine or member if member else ""


def _host(beat: ProbeHeartbeat) -> str:
    return beat.member or beat.service
