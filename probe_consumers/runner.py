"""Runs every binding on every open stream, and scores the rows of all streams of a batch with one call per binding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from probe_consumers.bound import Bound, Clock, Speaker
from probe_consumers.chunks import Chunk, chunks_of, source_of
from probe_consumers.drift import DriftSeer
from probe_consumers.run import Run
from probe_consumers.scoring import Voice, score_chunks
from probe_consumers.versions import Versions
from undercurrent.protocol.host_events import Emission, Step
from undercurrent.protocol.messages import ProbeVerdict, RunState, VerdictKind
from undercurrent.protocol.streams import (
    Arrived,
    ArrivedStrand,
    Closed,
    Joined,
    Limited,
    Opened,
    Stream,
    StreamId,
    Withheld,
)

# All probes of a stream in one record, beside the stream's own state, of a topic with the broker's default limit.
MAX_STATES_CHARS = 512 * 1024


@dataclass(slots=True)
class _Live:
    """An open stream and its runs, in the order of the bindings.

    Args:
        stream: the stream.
        voices: what runs on it.
        runs: one per voice.
        started: every shard has, and the probes were told of the stream.
    """

    stream: Stream
    voices: tuple[Voice, ...]
    runs: list[Run]
    started: bool = False

    def asked(self, *, ended: bool) -> list[Voice | None]:
        """Return what runs on it, None in the place of what has ended, or of all where `ended`."""
        return [voice if run.alive and not ended else None for voice, run in zip(self.voices, self.runs, strict=True)]

    @property
    def bounds(self) -> list[Bound]:
        """The bindings that run on it."""
        return [voice.bound for voice in self.voices]


class BindingRunner:
    """A `StreamRunner` over the bindings of one point.

    Args:
        bounds: the bindings.
        service: consumer group that runs them.
        clock: tells the time that messages carry.
        versions: says which versions of them run on a stream; by default they themselves.
        drift: collects what drift is told by, of a live host.
    """

    def __init__(
        self,
        bounds: Sequence[Bound],
        service: str,
        clock: Clock,
        versions: Versions | None = None,
        drift: DriftSeer | None = None,
    ) -> None:
        self._versions = versions or Versions(bounds)
        self._service = service
        self._clock = clock
        self._voices: dict[int, Voice] = {}
        self._live: dict[int, dict[StreamId, _Live]] = defaultdict(dict)
        self._refused: dict[str, str] = {}
        self.drift = drift

    @property
    def refusals(self) -> dict[str, str]:
        """Why a binding's latest stream was refused, by binding; gone when it takes a stream again."""
        return dict(self._refused)

    @property
    def open_streams(self) -> int:
        """Streams that are open."""
        return sum(map(len, self._live.values()))

    def process(self, steps: Sequence[Step]) -> Iterator[Emission]:
        """Take the steps of a batch; see `StreamRunner.process`."""
        opening, withheld = self._look_ahead(steps)
        chunks = chunks_of(steps)
        # After a record that kills come others like it: from there on no probe sees anything of its stream.
        score_chunks(
            (chunk, self._live_of(chunk, opening).asked(ended=number > withheld.get(id(chunk.stream), number)))
            for number, chunk in chunks.items()
        )
        if self.drift is not None:
            self.drift.rows(chunks.values(), lambda chunk: self._live_of(chunk, opening).bounds)
        said: dict[int, list[tuple[int, Emission]]] = {}
        for number, step in enumerate(steps):
            event = step.event
            if type(event) is Arrived and number not in chunks and number not in said:
                continue  # most blocks: what they say was said with the first of their chunk, or waits for its turn
            live = self._live[step.partition]
            if isinstance(event, Arrived | ArrivedStrand):
                if number in chunks:
                    # Its later blocks too: no other stream has to do with them. What they say waits for its turn.
                    self._arrived(chunks[number], live[event.stream.id], said)
                yield from _turn(steps, number, said)
                continue
            if isinstance(event, Limited):
                for run in live[event.stream.id].runs:
                    yield from run.limit(source_of(step))
                continue
            if isinstance(event, Withheld):
                yield from self._withhold(step, event, live, opening)
                continue
            if isinstance(event, Opened):
                live[event.stream.id] = opening[id(event.stream)]
            if isinstance(event, Opened | Joined) and event.layers is not None:
                yield from self._start(step, live[event.stream.id], event.layers)
            elif isinstance(event, Closed):
                yield from self._close(step, live.pop(event.stream.id))

    def _look_ahead(self, steps: Sequence[Step]) -> tuple[dict[int, _Live], dict[int, int]]:
        """Return the streams that open in a batch, and at which step others are kept from their probes, by identity."""
        opening: dict[int, _Live] = {}
        withheld: dict[int, int] = {}
        for number, step in enumerate(steps):
            event = step.event
            if type(event) is Arrived or type(event) is ArrivedStrand:  # most are
                continue
            if isinstance(event, Withheld):
                withheld.setdefault(id(event.stream), number)
                event = event.event
            if isinstance(event, Opened):
                opening[id(event.stream)] = self._open(event.stream)
        return opening, withheld

    def watermarks(self, partition: int) -> Iterator[ProbeVerdict]:
        """Return what no verdict has carried yet; see `StreamRunner.watermarks`."""
        for live in self._live[partition].values():
            for run in live.runs:
                if run.alive:
                    yield from run.watermarks()

    def states(self, partition: int, stream: Stream) -> tuple[RunState, ...] | None:
        """Return how far the probes of an open stream have come; see `StreamRunner.states`."""
        live = self._live[partition][stream.id]
        found = [run.state() for run in live.runs]
        whole = tuple(item for item in found if item is not None)
        fits = sum(len(item.state) for item in whole) <= MAX_STATES_CHARS
        return whole if fits and len(whole) == len(found) else None

    def restore(self, partition: int, stream: Stream, runs: Sequence[RunState], said_from: int) -> bool:
        """Take an open stream up; see `StreamRunner.restore`."""
        live = self._open(stream)
        live.started = stream.layers is not None
        self._live[partition][stream.id] = live
        known = {(item.probe, item.fingerprint): item for item in runs}
        sound = True
        for run in live.runs:
            sound &= run.restore(known.get(run.name), stream.layers, said_from)
        return sound

    def forget(self, partition: int) -> None:
        """Drop all state of a partition."""
        self._live.pop(partition, None)
        if self.drift is not None:
            self.drift.forget(partition)

    def _open(self, stream: Stream) -> _Live:
        voices = tuple(map(self._voice, self._versions.of(stream.id.request_id, stream.started.rollouts)))
        return _Live(stream, voices, [Run(voice.bound, voice.speaker, stream) for voice in voices])

    def _voice(self, bound: Bound) -> Voice:
        # Kept: whether a class fits a protocol takes longer than scoring a row. It holds its binding, so that no other
        # one gets the same identity.
        voice = self._voices.get(id(bound))
        if voice is None:
            voice = Voice(bound, bound.loaded.batch, Speaker(bound, self._service, self._clock))
            self._voices[id(bound)] = voice
        return voice

    def _start(self, step: Step, live: _Live, layers: tuple[int, ...]) -> Iterator[Emission]:
        live.started = True
        for run, voice in zip(live.runs, live.voices, strict=True):
            said = list(run.start(source_of(step), layers))
            if said:
                self._refused[voice.bound.binding.name] = said[0].verdict.error or ""
            else:
                self._refused.pop(voice.bound.binding.name, None)
            yield from said

    def _live_of(self, chunk: Chunk, opening: Mapping[int, _Live]) -> _Live:
        return opening.get(id(chunk.stream)) or self._live[chunk.partition][chunk.stream.id]

    def _arrived(self, chunk: Chunk, live: _Live, said: dict[int, list[tuple[int, Emission]]]) -> None:
        """Feed a chunk to the probes; `said` gets what they say at its steps, with the offset and by binding."""
        for run, scores in zip(live.runs, chunk.scores, strict=True):
            for at, emission in run.take_chunk(chunk, scores):
                said.setdefault(chunk.numbers[at], []).append((chunk.source(at).offset, emission))

    def _withhold(
        self, step: Step, event: Withheld, live: dict[StreamId, _Live], opening: Mapping[int, _Live]
    ) -> Iterator[Emission]:
        """End the probes of a stream whose record kills, without showing it to them."""
        name = event.stream.id
        if isinstance(event.event, Opened):
            live[name] = opening[id(event.stream)]
        live[name].started = True
        for run in live[name].runs:
            yield from run.withhold(source_of(step), event.said_from, event.place or str(step.offset))
        if isinstance(event.event, Closed):
            del live[name]

    def _close(self, step: Step, live: _Live) -> Iterator[Emission]:
        if not live.stream.known:
            for run in live.runs:
                yield from run.end_unknown(source_of(step))
            return
        if not live.started:
            known = {layer for shard in live.stream.shards.values() if shard.started for layer in shard.started.layers}
            yield from self._start(step, live, tuple(sorted(known)))
        for run, voice in zip(live.runs, live.voices, strict=True):
            for emission in run.end(source_of(step)):
                if self.drift is not None and not step.silent and emission.verdict.kind is VerdictKind.RESULT:
                    self.drift.ended(voice.bound, step.partition, emission.verdict, live.stream)
                yield emission


def _turn(steps: Sequence[Step], number: int, said: dict[int, list[tuple[int, Emission]]]) -> list[Emission]:
    """Take away, and return, what is said at a step where blocks arrive; of a stretch record by record, at its end.

    Args:
        steps: of the batch.
        number: of the step.
        said: by step, with the offsets of the records.
    """
    step, following = steps[number], steps[number + 1] if number + 1 < len(steps) else None
    mine = said.pop(number, [])
    if following is not None and _is_strand(step) and _is_strand(following) and step[:2] == following[:2]:
        if mine:
            said.setdefault(number + 1, [])[:0] = mine
        return []
    return [emission for _, emission in sorted(mine, key=itemgetter(0))]


def _is_strand(step: Step) -> bool:
    return type(step.event) is ArrivedStrand
