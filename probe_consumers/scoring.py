"""Scores of the chunks of a batch: those of all streams together, with one call per binding and kind of row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from probe_consumers.bound import FAULTS, Bound, Speaker
from probe_consumers.chunks import AT_ONCE, Chunk, Scores
from undercurrent.codec.strands import joined
from undercurrent.codec.tensors import rows_of
from undercurrent.core import BatchProbe, score_rows, wanted_layers
from undercurrent.errors import ProbeError
from undercurrent.protocol.messages import ActivationBlock

_PART_BYTES = 512 << 10
_NONE: NDArray[np.float32] = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """A binding that runs, and what is asked of it for every stream.

    Args:
        bound: the binding.
        batch: its probe, where rows of many streams can be scored at once.
        speaker: makes its messages.
    """

    bound: Bound
    batch: BatchProbe | None
    speaker: Speaker


@dataclass(slots=True)
class _Group:
    """Chunks that one call can score: of one voice and one kind of row.

    Args:
        voice: the voice.
        batch: its probe.
        places: the chunks, and where among their scores these go.
    """

    voice: Voice
    batch: BatchProbe
    places: list[tuple[Chunk, int]] = field(default_factory=list)


def score_chunks(asked: Iterable[tuple[Chunk, Sequence[Voice | None]]]) -> None:
    """Give each chunk its scores, one per voice of its stream; a voice without batch scoring has empty ones.

    Args:
        asked: the chunks and their voices, None for one that is not to be asked.
    """
    groups: dict[tuple[int, str, int, tuple[int, ...]], _Group] = {}
    for chunk, voices in asked:
        first = chunk.first
        chunk.scores = [Scores() for _ in voices]
        for at, voice in enumerate(voices):
            if voice is not None and voice.batch is not None:
                key = (id(voice), first.dtype, first.width, first.layers)
                groups.setdefault(key, _Group(voice, voice.batch)).places.append((chunk, at))
    for group in groups.values():
        layers = _scored_layers(group.voice.bound, group.places[0][0].first)
        if isinstance(layers, Scores):
            found: list[Scores | list[Scores]] = [layers] * len(group.places)
        else:
            found = _score_together(group.batch, layers, [chunk for chunk, _ in group.places])
        for (chunk, at), scores in zip(group.places, found, strict=True):
            chunk.scores[at] = scores


def _scored_layers(bound: Bound, block: ActivationBlock) -> tuple[int, ...] | Scores:
    """Return the layers of a block that are to be scored, or the scores at once where there are none."""
    try:
        layers = wanted_layers(bound.loaded.sample, block.layers)
        foreign = sorted(set(layers) - set(block.layers))
        if foreign:
            raise ProbeError(f"layers_to_score named {foreign}; accepted: some of {list(block.layers)}")
    except FAULTS as exc:  # it ends for these requests alone
        return Scores(error=exc)
    # No layer of it is wanted: nothing to score, and no reason to look at it record by record.
    return layers or Scores(values=_NONE)


def _score_together(batch: BatchProbe, layers: tuple[int, ...], chunks: list[Chunk]) -> list[Scores | list[Scores]]:
    """Score chunks of one kind together; where that raises, block by block: only the guilty one fails."""
    try:
        values = _values(batch, layers, chunks)
    except FAULTS:
        return [[_alone(batch, layers, block) for block in chunk.blocks] for chunk in chunks]
    finite = bool(np.isfinite(values).all())  # of all together, as they nearly always are
    found: list[Scores | list[Scores]] = []
    at = 0
    for chunk in chunks:
        stop = at + sum(chunk.tokens)
        found.append(Scores(layers, values[at:stop], finite=finite))
        at = stop
    return found


def _alone(batch: BatchProbe, layers: tuple[int, ...], block: ActivationBlock) -> Scores:
    try:
        return Scores(layers, _scored(batch, layers, block, [block.data], AT_ONCE))
    except FAULTS as exc:  # it ends for that request alone
        return Scores(error=exc)


def _values(batch: BatchProbe, layers: tuple[int, ...], chunks: Sequence[Chunk]) -> NDArray[np.float32]:
    """Return the scores of blocks of one kind, [n, L] or [n, L, C]."""
    values = [value for chunk in chunks for value in chunk.values]
    starts = b"".join([start for chunk in chunks for start in chunk.starts])
    first = chunks[0].first
    scattered = getattr(batch, "score_scattered", None)
    if scattered is not None and layers == first.layers:
        rows = len(layers) * sum(sum(chunk.tokens) for chunk in chunks)
        scores = scattered(values, starts, rows, first.dtype)
        if scores is not None:
            return cast(NDArray[np.float32], scores).reshape(-1, len(layers))
    found = [_scored(batch, layers, first, values[at:end], starts[4 * at : 4 * end]) for at, end in _parts(values)]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _parts(values: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield parts, first and behind the last, that stay in a core's cache from their joining to their scores."""
    first = size = 0
    for number, value in enumerate(values):
        if size and size + len(value) > _PART_BYTES:
            yield first, number
            first, size = number, 0
        size += len(value)
    yield first, len(values)


def _scored(
    batch: BatchProbe, layers: tuple[int, ...], first: ActivationBlock, values: Sequence[bytes], starts: bytes
) -> NDArray[np.float32]:
    rows: NDArray[Any] = rows_of(joined(values, starts), first.dtype, first.width)
    tokens = len(rows) // len(first.layers)
    if layers != first.layers:
        columns = [first.layers.index(layer) for layer in layers]
        rows = rows.reshape(tokens, -1, first.width)[:, columns].reshape(-1, first.width)
    scores = score_rows(batch, rows, lambda: np.tile(np.array(layers, np.int32), tokens))
    return scores.reshape(tokens, len(layers), *scores.shape[1:])
