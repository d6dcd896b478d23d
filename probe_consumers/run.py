"""One probe on one stream: fed in order, asked for its result once, and ended alone where it raises."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Real
from typing import cast

import numpy as np
from numpy.typing import NDArray

from probe_consumers.bound import FAULTS, Bound, Source, Speaker, action_of, error_of, index_of, text_of, words
from probe_consumers.chunks import Chunk, Scores
from probe_consumers.judging import cut, judge_records, kind_of, rank
from probe_consumers.progress import Owed, Progress
from probe_consumers.unsaid import Unsaid, grouped
from undercurrent.codec import positions
from undercurrent.core import (
    BatchProbe,
    Coverage,
    Probe,
    ProbeResult,
    ProbeSignal,
    RequestContext,
    StatefulProbe,
    StreamFacts,
)
from undercurrent.errors import ProbeError
from undercurrent.protocol.host_events import Emission
from undercurrent.protocol.join_key import REBUILD_LIMIT
from undercurrent.protocol.messages import (
    ActivationBlock,
    ProbeVerdict,
    RunState,
    VerdictAction,
    VerdictKind,
)
from undercurrent.protocol.streams import Stream

logger = logging.getLogger(__name__)

# Two numbers far apart in a stream that somebody made up can add up to more than a verdict's field holds.
_MOST_MISSING = 2**63 - 1
# What of a probe's own metadata has a field of the verdict.
_FIELDS = frozenset({"score", "partial"})


class Run:
    """One probe on one stream.

    Args:
        bound: the binding.
        speaker: makes its messages.
        stream: the stream.
    """

    def __init__(self, bound: Bound, speaker: Speaker, stream: Stream) -> None:
        self._bound = bound
        self._speaker = speaker
        self._stream = stream
        self._probe: Probe | None = None
        self._context = RequestContext(stream.id.request_id)
        self._at = Progress()
        self._unsaid: list[Unsaid] = []
        self._moved = False
        self._source = Source(partition=0, offset=0, timestamp_us=0)

    @property
    def name(self) -> tuple[str, str]:
        """Name and fingerprint of its probe."""
        return self._bound.binding.name, self._bound.loaded.fingerprint

    @property
    def alive(self) -> bool:
        """Whether it has neither raised nor refused the stream."""
        return not self._at.failed

    def start(self, source: Source, layers: tuple[int, ...]) -> Iterator[Emission]:
        """Tell the probe of the stream.

        Args:
            source: the record that completed what is known of it.
            layers: layers of all its shards.
        """
        self._at.started = True
        if self._at.failed:
            yield from self._settle(source)
            return
        try:
            self._begin(layers)
        except FAULTS as exc:  # it ends for this request alone
            yield self._fail(source, exc)

    def _begin(self, layers: tuple[int, ...]) -> None:
        message = self._stream.started
        facts = StreamFacts(
            prompt_len=message.prompt_len,
            layers=layers,
            width=message.width,
            tensor_type=message.tensor_type,
            dtype=message.dtype,
            cached_prefix=message.cached_prefix,
            model=message.model,
            model_fingerprint=message.model_fingerprint,
            lora=message.lora,
            quantization=message.quantization,
            row_shape=message.row_shape,
            parts=self._stream.parts,
        )
        self._context = RequestContext(self._stream.id.request_id, stream=facts)
        self._bound.loaded.check(facts)
        self._probe = self._bound.loaded.factory.spawn(self._stream.id.request_id, self._bound.binding.point)
        self._probe.on_start(self._context)

    def take_chunk(self, chunk: Chunk, scores: Scores | Sequence[Scores]) -> Iterator[tuple[int, Emission]]:
        """Feed blocks to the probe; yield what it says, each with the number of the block that it says it at.

        Args:
            chunk: the blocks.
            scores: what the batch scoring gave for them.
        """
        if self._at.failed:
            if self._at.owed is not None:
                for at in range(len(chunk)):
                    for emission in self._settle(chunk.source(at)):
                        yield at, emission
            return
        if isinstance(scores, Scores):
            joined = self._joined(chunk, scores) if len(chunk) > 1 else None
            if joined is not None:
                yield from self._take_joined(chunk, scores, joined)
                return
            scores = cut(chunk, scores)
        for at, block in enumerate(chunk.blocks):
            for emission in self._take(chunk.source(at), block, chunk.clear_up_to[at], scores[at], silent=chunk.silent):
                yield at, emission

    def _joined(self, chunk: Chunk, scores: Scores) -> NDArray[np.int32] | None:
        """Return the positions of blocks that the probe may be given as one; None where it has to see each.

        A probe that `joins_blocks` says the same of tokens however they are cut into blocks. That leaves what is not
        the probe's doing: a block that does not fit its stream or its positions, and scores that end the run.
        """
        values = scores.values
        if values is None or not scores.layers or not getattr(self._probe, "joins_blocks", False):
            return None
        started, block = self._stream.started, chunk.first
        known = self._context.stream.layers if self._context.stream else ()
        of_stream = (started.dtype, started.tensor_type, started.width, started.row_shape)
        if (block.dtype, block.tensor_type, block.width, block.row_shape) != of_stream:
            return None
        places = np.frombuffer(b"".join(chunk.positions), "<i4")
        fits = block.layers == known and bool((places[1:] > places[:-1]).all())
        return places if fits and (scores.finite or bool(np.isfinite(values).all())) else None

    def _take_joined(self, chunk: Chunk, scores: Scores, places: NDArray[np.int32]) -> Iterator[tuple[int, Emission]]:
        values = cast(NDArray[np.float32], scores.values)
        at, said = 0, list[Emission]()
        try:
            signal = cast(BatchProbe, self._probe).on_scores(places, scores.layers, values)
            if signal is not None and signal.acts:
                at = chunk.number_at(places, index_of(signal.token_pos, "token_pos"))
                said = list(self._signals(chunk.source(at), [signal], chunk.clear_up_to[at]))
        except FAULTS as exc:
            for emission in (*self._flush(), self._fail(chunk.source(0), exc)):
                yield 0, emission
            return
        for emission in said:
            yield at, emission
        self._at.clear_up_to, self._source = chunk.clear_up_to[-1], chunk.source(len(chunk) - 1)
        shown = values if values.ndim == 2 else values[:, :, 0]
        self._at.scored += shown.size
        if not chunk.silent:
            self._moved = True
            self._unsaid.append(Unsaid(places.tobytes(), scores.layers, shown.astype("<f4").tobytes()))

    def _take(
        self, source: Source, block: ActivationBlock, clear_up_to: int, scores: Scores, *, silent: bool
    ) -> Iterator[Emission]:
        if self._at.failed:
            return
        try:
            signals, unsaid = self._judge(block, scores)
            said = list(self._signals(source, signals, clear_up_to))
        except FAULTS as exc:
            yield from self._flush()
            yield self._fail(source, exc)
            return
        self._at.clear_up_to, self._source = clear_up_to, source
        self._at.scored += int(np.isfinite(np.frombuffer(unsaid.scores, "<f4")).sum())
        if not silent:
            self._moved = True
            self._unsaid.append(unsaid)
        yield from said

    def end(self, source: Source) -> Iterator[Emission]:
        """Ask the probe for its result."""
        yield from self._settle(source)
        if self._probe is None:
            return
        try:
            stream = self._stream
            coverage = Coverage(missing=stream.missing + stream.unjoined, dropped=stream.cut)
            verdict = self._result(source, self._probe.on_end(replace(self._context, coverage=coverage)))
        except FAULTS as exc:
            if not self._at.failed:
                yield from self._flush()
                yield self._fail(source, exc)
            return
        if not self._at.failed:  # else its error was its last word
            yield from self._flush()
            yield Emission(verdict=verdict, timestamp_us=source.timestamp_us, silent=source.silent)

    def end_unknown(self, source: Source) -> Iterator[Emission]:
        """Say that a stream has ended of which not enough was known to ask the probe."""
        if not self._at.failed:
            nothing = ProbeResult(self._stream.id.request_id, self._bound.binding.point, "")
            yield Emission(
                verdict=self._result(source, nothing), timestamp_us=source.timestamp_us, silent=source.silent
            )

    def limit(self, source: Source) -> Iterator[Emission]:
        """End a probe that cannot be written down: its stream has gone on for too long to be read again."""
        if self._at.failed or self._probe is None or self.state() is not None:
            return
        probe, self._probe = self._probe, None
        context = replace(self._context, coverage=Coverage(missing=self._stream.missing + self._stream.unjoined))
        try:
            verdict = self._result(source, probe.on_end(context))
        except FAULTS as exc:
            yield from self._flush()
            yield self._fail(source, exc)
            return
        yield from self._flush()
        self._at.failed = True
        yield Emission(verdict=replace(verdict, complete=False, end_reason=REBUILD_LIMIT), silent=source.silent)

    def withhold(self, source: Source, said_from: int, place: str) -> Iterator[Emission]:
        """End the probe without showing it a record that kills; it is told of nothing any more.

        Args:
            source: the record.
            said_from: offset from which on that is said.
            place: of the record, in words.
        """
        if not self._at.failed:
            yield from self._flush()
            self._probe = None
            self._at.failed = True
            self._at.owed = Owed(said_from, f"quarantined: no host survives record {place}")
        yield from self._settle(source)

    def _settle(self, source: Source) -> Iterator[Emission]:
        """Say what could not be said before."""
        if self._at.owed is not None and source.offset >= self._at.owed.said_from:
            error, self._at.owed = self._at.owed.error, None
            yield self._error(source, error)

    # --- written down, and taken up elsewhere

    def state(self) -> RunState | None:
        """Return how far it has come; None where its probe cannot be written down."""
        data = self._at.to_plain()
        try:
            if self._probe is not None and not self._at.failed:
                data["probe"] = cast(StatefulProbe, self._probe).state()
            text = json.dumps(data, allow_nan=False, separators=(",", ":"))
        except FAULTS:  # it has none, or one that is no plain data
            return None
        name, fingerprint = self.name
        return RunState(probe=name, probe_version=self._bound.loaded.version, fingerprint=fingerprint, state=text)

    def restore(self, state: RunState | None, layers: tuple[int, ...] | None, said_from: int) -> bool:
        """Go on from a state; where that cannot be done it fails, which is said from an offset on, and returns False.

        Args:
            state: what `state` gave; None where there is none of this probe.
            layers: of all shards, None while one has not started.
            said_from: that offset.
        """
        try:
            if state is None:
                raise ProbeError("the stream began before this probe ran, too long ago to be read again")
            data = json.loads(state.state)
            self._at = Progress.from_plain(data)
            if self._at.failed:
                return True
            if self._at.started:
                self._begin(layers or ())
                cast(StatefulProbe, self._probe).restore(data["probe"])
        except FAULTS as exc:  # it ends for this request alone
            self._at.failed, self._probe = True, None
            self._at.owed = Owed(said_from, error_of(exc))
            return False
        return True

    def watermarks(self) -> Iterator[ProbeVerdict]:
        """Return, and forget, the scores that no verdict has carried yet."""
        if not self._moved:
            return
        self._moved = False
        unsaid, self._unsaid = self._unsaid, []
        groups = grouped(unsaid) or [[Unsaid(b"", (), b"")]]
        said, self._at.said_clear_up_to = self._at.said_clear_up_to, self._at.clear_up_to
        for group in groups:
            yield self._speaker.verdict(
                self._stream.id,
                self._source,
                VerdictKind.WATERMARK,
                score=self._aggregate(),
                clear_up_to=self._at.clear_up_to if group is groups[-1] else said,
                score_positions=b"".join(item.positions for item in group),
                score_layers=group[0].layers,
                scores=b"".join(item.scores for item in group),
            )

    def _aggregate(self) -> float | None:
        try:
            value = getattr(self._probe, "aggregate", None)
        except FAULTS:  # its verdict goes without
            return None
        return float(value) if isinstance(value, Real) else None

    def _flush(self) -> Iterator[Emission]:
        return (Emission(verdict=verdict) for verdict in self.watermarks())

    def _judge(self, block: ActivationBlock, scores: Scores) -> tuple[list[ProbeSignal], Unsaid]:
        started = self._stream.started
        of_block, of_stream = kind_of(block), kind_of(started)
        if of_block != of_stream:
            raise ProbeError(f"a block of {of_block} in a stream of {of_stream}")
        known = self._context.stream.layers if self._context.stream else ()
        if block.layers != known and not set(block.layers) <= set(known):
            # Passed over, it would be a clear verdict on activations that nobody looked at.
            raise ProbeError(f"a block of layers {list(block.layers)} in a stream of layers {list(known)}")
        if scores.error is not None:
            raise scores.error
        if scores.values is None:
            return judge_records(cast(Probe, self._probe), block, self._stream.started.prompt_len)
        if not scores.layers:
            return [], Unsaid(b"", (), b"")
        signal = cast(BatchProbe, self._probe).on_scores(positions(block), scores.layers, scores.values)
        shown = scores.values if scores.values.ndim == 2 else scores.values[:, :, 0]
        said = Unsaid(block.positions, scores.layers, shown.astype("<f4").tobytes())
        return ([] if signal is None or not signal.acts else [signal]), said

    def _signals(self, source: Source, signals: Sequence[ProbeSignal], clear_up_to: int) -> Iterator[Emission]:
        for signal in signals:
            # One signal per action: a probe that flags every token says nothing new with the second.
            if self._at.strongest is None or rank(signal) > rank(self._at.strongest):
                self._at.strongest = signal
                verdict, command = self._speaker.signal(self._stream.id, source, signal, clear_up_to)
                yield Emission(verdict=verdict, command=command, timestamp_us=source.timestamp_us, silent=source.silent)

    def _result(self, source: Source, result: ProbeResult) -> ProbeVerdict:
        strongest = self._at.strongest
        score, partial = result.metadata.get("score"), result.metadata.get("partial")
        return self._speaker.verdict(
            self._stream.id,
            source,
            VerdictKind.RESULT,
            action=VerdictAction.CONTINUE if strongest is None else action_of(strongest),
            verdict=text_of(result.verdict),
            score=None if score is None else float(score),
            token_pos=None if strongest is None else index_of(strongest.token_pos, "token_pos"),
            layer=None if strongest is None else index_of(strongest.layer, "layer"),
            # Of a stream that was rewound less is clear than was said once.
            clear_up_to=min(self._at.clear_up_to, self._stream.clear_up_to),
            scored=self._at.scored,
            complete=self._stream.complete,
            missing=min(self._stream.missing, _MOST_MISSING),
            # A probe that counts only some positions knows better than its stream whether one of them is missing.
            partial=partial if isinstance(partial, bool) else self._stream.partial,
            end_reason=self._stream.end_reason,
            metadata=words({key: value for key, value in result.metadata.items() if key not in _FIELDS}),
        )

    def _fail(self, source: Source, exc: BaseException) -> Emission:
        self._at.failed = True
        name = self._bound.binding.name
        logger.warning("probe %s raised %s", name, type(exc).__name__, exc_info=not isinstance(exc, ProbeError))
        return self._error(source, error_of(exc))

    def _error(self, source: Source, error: str) -> Emission:
        verdict = self._speaker.verdict(
            self._stream.id,
            source,
            VerdictKind.ERROR,
            clear_up_to=self._at.clear_up_to,
            scored=self._at.scored,
            error=error,
        )
        return Emission(verdict=verdict, timestamp_us=source.timestamp_us, silent=source.silent)
