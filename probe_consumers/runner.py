"""Runs every binding on every open stream, and scores the rows of all streams of a batch with one call per binding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probe_consumers.bound import FAULTS, Bound, Clock, Source, Speaker, captured_at
from probe_consumers.run import Run, Scores, rows_of
from undercurrent.core import BatchProbe, score_rows, wanted_layers
from undercurrent.errors import ProbeError
from undercurrent.protocol.host_events import Emission, Step
from undercurrent.protocol.messages import ActivationBlock, ProbeVerdict
from undercurrent.protocol.streams import Arrived, Closed, Joined, Opened, Stream, StreamId


@dataclass(slots=True)
class _Live:
    """An open stream and its runs, in the order of the bindings.

    Args:
        stream: the stream.
        runs: one per binding.
        started: every shard has, and the probes were told of the stream.
    """

    stream: Stream
    runs: list[Run]
    started: bool = False


_Group = tuple[int, str, int]
"""Binding, dtype, width: rows that one call can score."""


class BindingRunner:
    """A `StreamRunner` over a fixed set of bindings of one point.

    Args:
        bounds: the bindings.
        service: consumer group that runs them.
        clock: tells the time that messages carry.
    """

    def __init__(self, bounds: Sequence[Bound], service: str, clock: Clock) -> None:
        self._bounds = tuple(bounds)
        # Asked once: whether a class fits a protocol takes longer than scoring a row.
        self._batches = [bound.loaded.batch for bound in bounds]
        self._speakers = [Speaker(bound, service, clock) for bound in bounds]
        self._live: dict[int, dict[StreamId, _Live]] = defaultdict(dict)
        self._refused: dict[str, str] = {}

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
        blocks = [step.event.block for step in steps if isinstance(step.event, Arrived)]
        scores = self._score(blocks)
        for step in steps:
            event = step.event
            live = self._live[step.partition]
            if isinstance(event, Opened):
                live[event.stream.id] = self._open(event.stream)
            if isinstance(event, Opened | Joined) and event.layers is not None:
                yield from self._start(step, live[event.stream.id], event.layers)
            elif isinstance(event, Arrived):
                yield from self._arrived(step, live[event.stream.id], event, scores[id(event.block)])
            elif isinstance(event, Closed):
                yield from self._close(step, live.pop(event.stream.id))

    def watermarks(self, partition: int) -> Iterator[ProbeVerdict]:
        """Return what no verdict has carried yet; see `StreamRunner.watermarks`."""
        for live in self._live[partition].values():
            for run in live.runs:
                if run.alive:
                    yield from run.watermarks()

    def forget(self, partition: int) -> None:
        """Drop all state of a partition."""
        self._live.pop(partition, None)

    def _open(self, stream: Stream) -> _Live:
        return _Live(
            stream, [Run(bound, says, stream) for bound, says in zip(self._bounds, self._speakers, strict=True)]
        )

    def _start(self, step: Step, live: _Live, layers: tuple[int, ...]) -> Iterator[Emission]:
        live.started = True
        for run, bound in zip(live.runs, self._bounds, strict=True):
            said = list(run.start(_source(step), layers))
            if said:
                self._refused[bound.binding.name] = said[0].verdict.error or ""
            else:
                self._refused.pop(bound.binding.name, None)
            yield from said

    def _arrived(self, step: Step, live: _Live, event: Arrived, scores: Sequence[Scores]) -> Iterator[Emission]:
        source = _source(step, event.block)
        for run, mine in zip(live.runs, scores, strict=True):
            yield from run.take(source, event.block, event.clear_up_to, mine, silent=step.silent)

    def _close(self, step: Step, live: _Live) -> Iterator[Emission]:
        if not live.started:
            known = {layer for shard in live.stream.shards.values() if shard.started for layer in shard.started.layers}
            yield from self._start(step, live, tuple(sorted(known)))
        for run in live.runs:
            yield from run.end(_source(step))

    def _score(self, blocks: Sequence[ActivationBlock]) -> dict[int, list[Scores]]:
        """Return the scores of each block under each binding, by the block's identity."""
        scores: dict[int, list[Scores]] = {id(block): [Scores() for _ in self._bounds] for block in blocks}
        groups: dict[_Group, list[tuple[ActivationBlock, tuple[int, ...]]]] = defaultdict(list)
        for block in blocks:
            for number, bound in enumerate(self._bounds):
                if self._batches[number] is None:
                    continue
                try:
                    layers = _scored_layers(bound, block)
                except FAULTS as exc:  # it ends for that request alone
                    scores[id(block)][number] = Scores(error=exc)
                    continue
                if layers and block.positions:
                    groups[number, block.dtype, block.width].append((block, layers))
                else:
                    # No layer of it is wanted: nothing to score, and no reason to look at it record by record.
                    scores[id(block)][number] = Scores(values=_NONE)
        for (number, _, _), parts in groups.items():
            batch = self._batches[number]
            assert batch is not None  # noqa: S101 - others were passed over above
            for (block, _), mine in zip(parts, _score_parts(batch, parts), strict=True):
                scores[id(block)][number] = mine
        return scores


_NONE: NDArray[np.float32] = np.empty((0, 0), np.float32)


def _scored_layers(bound: Bound, block: ActivationBlock) -> tuple[int, ...]:
    layers = wanted_layers(bound.loaded.sample, block.layers)
    foreign = sorted(set(layers) - set(block.layers))
    if foreign:
        raise ProbeError(f"layers_to_score named {foreign}; accepted: some of {list(block.layers)}")
    return layers


def _score_parts(batch: BatchProbe, parts: Sequence[tuple[ActivationBlock, tuple[int, ...]]]) -> list[Scores]:
    """Score blocks of one dtype and width together; where that raises, one by one: only the guilty one fails."""
    stacked: list[NDArray[Any]] = [rows_of(block, layers) for block, layers in parts]
    try:
        rows = stacked[0] if len(stacked) == 1 else np.concatenate(stacked)
        values = score_rows(batch, rows, lambda: _layers_of(parts))
    except FAULTS as exc:  # it ends for that request alone
        if len(parts) == 1:
            return [Scores(error=exc)]
        return [_score_parts(batch, [part])[0] for part in parts]
    cuts = np.cumsum([len(rows) for rows in stacked])[:-1]
    return [
        Scores(layers, mine.reshape(-1, len(layers), *mine.shape[1:]))
        for (_, layers), mine in zip(parts, np.split(values, cuts), strict=True)
    ]


def _layers_of(parts: Sequence[tuple[ActivationBlock, tuple[int, ...]]]) -> NDArray[np.int32]:
    tokens = (len(block.positions) // 4 for block, _ in parts)
    return np.concatenate([np.tile(np.array(mine, np.int32), n) for n, (_, mine) in zip(tokens, parts, strict=True)])


def _source(step: Step, block: ActivationBlock | None = None) -> Source:
    return Source(
        partition=step.partition,
        offset=step.offset,
        timestamp_us=step.timestamp_us,
        captured_at_us=captured_at(block),
    )
