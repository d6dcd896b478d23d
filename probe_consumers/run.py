"""One probe on one stream: fed in order, asked for its result once, and ended alone where it raises."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from probe_consumers.bound import FAULTS, Bound, Source, Speaker, action_of, error_of, index_of, text_of, words
from undercurrent.codec import as_array, positions, views
from undercurrent.core import (
    BatchProbe,
    Coverage,
    Probe,
    ProbeAction,
    ProbeResult,
    ProbeSignal,
    RequestContext,
    StreamFacts,
)
from undercurrent.errors import ProbeError
from undercurrent.protocol.host_events import Emission
from undercurrent.protocol.messages import ActivationBlock, ProbeVerdict, StreamStarted, VerdictAction, VerdictKind
from undercurrent.protocol.streams import Stream

logger = logging.getLogger(__name__)

# A verdict must fit into a topic with the broker's default limit of 1 MiB.
_MOST_SCORE_BYTES = 256 * 1024
# Two numbers far apart in a stream that somebody made up can add up to more than a verdict's field holds.
_MOST_MISSING = 2**63 - 1
# What of a probe's own metadata has a field of the verdict.
_FIELDS = frozenset({"score", "partial"})
_STRENGTH = (ProbeAction.CONTINUE, ProbeAction.FLAG, ProbeAction.ABORT)


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one block under one binding.

    Args:
        layers: layers of the columns.
        values: float32 [n, L], or [n, L, C] where the first of C numbers is the score; None where the probe scores
            record by record.
        error: why there are none.
    """

    layers: tuple[int, ...] = ()
    values: NDArray[np.float32] | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Unsaid:
    """Scores that no watermark has carried yet."""

    positions: bytes
    layers: tuple[int, ...]
    scores: bytes


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
        self._started = False
        self._failed = False
        self._unsaid: list[_Unsaid] = []
        self._moved = False
        self._scored = 0
        self._clear_up_to = -1
        self._said_clear_up_to = -1
        self._strongest: ProbeSignal | None = None
        self._source = Source(partition=0, offset=0, timestamp_us=0)

    @property
    def alive(self) -> bool:
        """Whether it has neither raised nor refused the stream."""
        return not self._failed

    @property
    def started(self) -> bool:
        """Whether the probe was told of the stream."""
        return self._started

    def start(self, source: Source, layers: tuple[int, ...]) -> Iterator[Emission]:
        """Tell the probe of the stream.

        Args:
            source: the record that completed what is known of it.
            layers: layers of all its shards.
        """
        self._started = True
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
        )
        self._context = RequestContext(self._stream.id.request_id, stream=facts)
        try:
            self._bound.loaded.check(facts)
            self._probe = self._bound.loaded.factory.spawn(self._stream.id.request_id, self._bound.binding.point)
            self._probe.on_start(self._context)
        except FAULTS as exc:  # it ends for this request alone
            yield self._fail(source, exc)

    def take(
        self, source: Source, block: ActivationBlock, clear_up_to: int, scores: Scores, *, silent: bool
    ) -> Iterator[Emission]:
        """Feed a block to the probe.

        Args:
            source: the block's record, or the one that released it.
            block: the activations.
            clear_up_to: the stream's clear mark after it.
            scores: what the batch scoring gave for it.
            silent: its outputs are written already.
        """
        if self._failed:
            return
        try:
            signals, unsaid = self._judge(block, scores)
            said = list(self._signals(source, signals, clear_up_to))
        except FAULTS as exc:
            yield from self._flush()
            yield self._fail(source, exc)
            return
        self._clear_up_to, self._source = clear_up_to, source
        self._scored += int(np.isfinite(np.frombuffer(unsaid.scores, "<f4")).sum())
        if not silent:
            self._moved = True
            self._unsaid.append(unsaid)
        yield from said

    def end(self, source: Source) -> Iterator[Emission]:
        """Ask the probe for its result."""
        if self._probe is None:
            return
        try:
            stream = self._stream
            coverage = Coverage(missing=stream.missing + stream.unjoined, dropped=stream.cut)
            verdict = self._result(source, self._probe.on_end(replace(self._context, coverage=coverage)))
        except FAULTS as exc:
            if not self._failed:
                yield from self._flush()
                yield self._fail(source, exc)
            return
        if not self._failed:  # else its error was its last word
            yield from self._flush()
            yield Emission(verdict=verdict, timestamp_us=source.timestamp_us)

    def watermarks(self) -> Iterator[ProbeVerdict]:
        """Return, and forget, the scores that no verdict has carried yet."""
        if not self._moved:
            return
        self._moved = False
        unsaid, self._unsaid = self._unsaid, []
        groups = _grouped(unsaid) or [[_Unsaid(b"", (), b"")]]
        said, self._said_clear_up_to = self._said_clear_up_to, self._clear_up_to
        for group in groups:
            yield self._speaker.verdict(
                self._stream.id,
                self._source,
                VerdictKind.WATERMARK,
                score=self._aggregate(),
                clear_up_to=self._clear_up_to if group is groups[-1] else said,
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

    def _judge(self, block: ActivationBlock, scores: Scores) -> tuple[list[ProbeSignal], _Unsaid]:
        started = self._stream.started
        of_block, of_stream = _kind(block), _kind(started)
        if of_block != of_stream:
            raise ProbeError(f"a block of {of_block} in a stream of {of_stream}")
        known = self._context.stream.layers if self._context.stream else ()
        if block.layers != known and not set(block.layers) <= set(known):
            # Passed over, it would be a clear verdict on activations that nobody looked at.
            raise ProbeError(f"a block of layers {list(block.layers)} in a stream of layers {list(known)}")
        if scores.error is not None:
            raise scores.error
        if scores.values is None:
            return self._judge_records(block)
        if not scores.layers:
            return [], _Unsaid(b"", (), b"")
        signal = cast(BatchProbe, self._probe).on_scores(positions(block), scores.layers, scores.values)
        shown = scores.values if scores.values.ndim == 2 else scores.values[:, :, 0]
        said = _Unsaid(block.positions, scores.layers, shown.astype("<f4").tobytes())
        return ([] if signal is None or not signal.acts else [signal]), said

    def _judge_records(self, block: ActivationBlock) -> tuple[list[ProbeSignal], _Unsaid]:
        values = as_array(block)
        if not np.isfinite(values.astype(np.float32)).all():
            raise ProbeError(f"a value of the block at seq {block.seq} is not finite")
        probe = cast(Probe, self._probe)
        scores = np.full(values.shape[:2], np.nan, "<f4")
        signals: list[ProbeSignal] = []
        for at, record in enumerate(views(block, self._stream.started.prompt_len)):
            signal = probe.on_activation(record)
            if signal is None:
                continue
            if signal.score is not None:
                scores[divmod(at, len(block.layers))] = signal.score
            if signal.acts:
                position = record.token_pos if signal.token_pos is None else signal.token_pos
                layer = record.layer if signal.layer is None else signal.layer
                signals.append(replace(signal, token_pos=position, layer=layer))
        return signals, _Unsaid(block.positions, block.layers, scores.tobytes())

    def _signals(self, source: Source, signals: Sequence[ProbeSignal], clear_up_to: int) -> Iterator[Emission]:
        for signal in signals:
            # One signal per action: a probe that flags every token says nothing new with the second.
            if self._strongest is None or _rank(signal) > _rank(self._strongest):
                self._strongest = signal
                verdict, command = self._speaker.signal(self._stream.id, source, signal, clear_up_to)
                yield Emission(verdict=verdict, command=command, timestamp_us=source.timestamp_us)

    def _result(self, source: Source, result: ProbeResult) -> ProbeVerdict:
        strongest = self._strongest
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
            clear_up_to=min(self._clear_up_to, self._stream.clear_up_to),
            scored=self._scored,
            complete=self._stream.complete,
            missing=min(self._stream.missing, _MOST_MISSING),
            # A probe that counts only some positions knows better than its stream whether one of them is missing.
            partial=partial if isinstance(partial, bool) else self._stream.partial,
            end_reason=self._stream.end_reason,
            metadata=words({key: value for key, value in result.metadata.items() if key not in _FIELDS}),
        )

    def _fail(self, source: Source, exc: BaseException) -> Emission:
        self._failed = True
        name = self._bound.binding.name
        logger.warning("probe %s raised %s", name, type(exc).__name__, exc_info=not isinstance(exc, ProbeError))
        verdict = self._speaker.verdict(
            self._stream.id,
            source,
            VerdictKind.ERROR,
            clear_up_to=self._clear_up_to,
            scored=self._scored,
            error=error_of(exc),
        )
        return Emission(verdict=verdict, timestamp_us=source.timestamp_us)


def _rank(signal: ProbeSignal) -> int:
    return _STRENGTH.index(signal.action)


def _kind(message: ActivationBlock | StreamStarted) -> str:
    """Return what must be equal in all blocks of a stream, in words."""
    shape = list(message.row_shape) if message.row_shape else f"width {message.width}"
    return f"{message.dtype} {message.tensor_type}, {shape}"


def _grouped(unsaid: Sequence[_Unsaid]) -> list[list[_Unsaid]]:
    """Cut a sequence where the layers change and before a verdict grows too large; leave out what is empty."""
    groups: list[list[_Unsaid]] = []
    room = 0
    for item in (piece for whole in unsaid for piece in _pieces(whole)):
        size = len(item.positions) + len(item.scores)
        if groups and groups[-1][0].layers == item.layers and size <= room:
            groups[-1].append(item)
        else:
            groups.append([item])
            room = _MOST_SCORE_BYTES
        room -= size
    return groups


def _pieces(whole: _Unsaid) -> Iterator[_Unsaid]:
    row = 4 * len(whole.layers)
    step = max(1, _MOST_SCORE_BYTES // (4 + row))
    for at in range(0, len(whole.positions) // 4, step):
        yield _Unsaid(
            whole.positions[4 * at : 4 * (at + step)], whole.layers, whole.scores[row * at : row * (at + step)]
        )


def rows_of(block: ActivationBlock, layers: Sequence[int]) -> NDArray[Any]:
    """Return the rows of some layers of a block, [n * L, width], tokens in order and layers within a token."""
    values = as_array(block)
    if tuple(layers) != block.layers:
        values = values[:, [block.layers.index(layer) for layer in layers], :]
    return values.reshape(-1, block.width)
