"""One probe on the records of one request, as hosts and routers run it, without either.

driven = drive(MyProbe, make_records(rows), settings={"threshold": 2.0})
assert driven.first_action.token_pos == 3
assert driven.result.verdict == "triggered"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from undercurrent.core import (
    BatchProbe,
    Probe,
    ProbeAction,
    ProbeFactory,
    ProbeResult,
    ProbeSignal,
    RequestContext,
    score_rows,
    wanted_layers,
)
from undercurrent.probes import load_probe
from undercurrent.spec import ActivationRecord
from undercurrent.testing.builders import POINT, REQUEST_ID, BlockSizes, RecordGrid, grid_of, make_context, spans

AnyProbe = type[Probe] | ProbeFactory | str
"""A class, a factory, or what a binding's `probe:` may say: a registered name, `module:Class`, a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """What a probe said of a request.

    Args:
        probe: the instance that judged it.
        signals: every signal that it gave, in order, each with the position and layer of the record that it is about.
        result: what it said at the end.
        scores: the scores that it gave, by (token position, layer).
        fed: records that it was given.
    """

    probe: Probe
    signals: tuple[ProbeSignal, ...]
    result: ProbeResult
    scores: Mapping[tuple[int, int], float] = field(default_factory=dict)
    fed: int = 0

    @property
    def actions(self) -> tuple[ProbeSignal, ...]:
        """The signals that ask for more than to go on."""
        return tuple(signal for signal in self.signals if signal.acts)

    @property
    def first_action(self) -> ProbeSignal | None:
        """The first signal that asks for more than to go on, None where there was none."""
        return next(iter(self.actions), None)


def drive(
    probe: AnyProbe,
    records: Iterable[ActivationRecord],
    *,
    settings: Mapping[str, Any] | None = None,
    blocks: BlockSizes | None = None,
    ctx: RequestContext | None = None,
    stop_at_abort: bool = False,
    base: str | Path = ".",
) -> Driven:
    """Run a probe on the records of one request: spawn it, start it, feed it in order, ask once for its result.

    Args:
        probe: class, factory, registered name, `module:Class` or folder.
        records: of one request at one point, in order.
        settings: for its constructor; they come before a factory's own.
        blocks: feed a batch probe blocks of so many tokens, one number for all or a list, through `score` and
            `on_scores` as a probe host does; without it every probe gets record by record through `on_activation`, as
            from a router.
        ctx: what it is told at start and end; by default what follows from the records.
        stop_at_abort: feed nothing after a signal that asks for an abort.
        base: folder that a relative probe folder starts from.

    Raises:
        TypeError: it is no probe, gave something that is no signal or no result, or `blocks` meets a probe that is no
            batch probe.
        ValueError: the records are not those of one request at one point.
        Exception: what the probe raises; `on_end` was called all the same.
    """
    factory = _factory(probe, settings, base)
    listed = list(records)
    context = ctx or (make_context(listed) if listed else RequestContext(REQUEST_ID))
    point = listed[0].extraction_point_name if listed else POINT
    instance = factory.spawn(context.request_id, point)
    feed = _Feed(instance, stop_at_abort=stop_at_abort)
    try:
        instance.on_start(context)
        if blocks is None:
            feed.records(listed)
        elif listed:
            feed.blocks(factory, grid_of(listed, context.stream.prompt_len if context.stream else None), blocks)
    except BaseException:
        with suppress(Exception):  # what it raised first is what the caller wants to see
            instance.on_end(context)
        raise
    result = instance.on_end(context)
    if not isinstance(result, ProbeResult):
        raise TypeError(f"{_name(instance)}.on_end returned {type(result).__name__}; accepted: a ProbeResult")
    return Driven(probe=instance, signals=tuple(feed.signals), result=result, scores=feed.scores, fed=feed.fed)


def assert_block_invariant(
    probe: AnyProbe,
    records: Sequence[ActivationRecord],
    *,
    settings: Mapping[str, Any] | None = None,
    ctx: RequestContext | None = None,
    rounds: int = 20,
    seed: int = 0,
) -> None:
    """Require that a batch probe says the same however its stream is cut into blocks, and row by row.

    What is compared is what a probe host would publish: the first signal of each strength, every score bit for bit, the
    verdict and its metadata. And a row's score may not depend on the rows beside it, which may be another stream's.

    Args:
        probe: class, factory, registered name, `module:Class` or folder.
        records: of one request at one point; give it enough that the probe acts.
        settings: for its constructor.
        ctx: what it is told at start and end.
        rounds: random cuts; one block, and blocks of one token, come on top.
        seed: of the cuts.

    Raises:
        AssertionError: it does not; the message has the cut and both outputs.
        TypeError: it is no batch probe.
    """
    factory = _factory(probe, settings, ".")
    grid = grid_of(records)
    count = len(grid.positions)
    _assert_rows_alone(_batch(factory), grid, seed)
    expected = _told(drive(factory, records, ctx=ctx))
    whole = drive(factory, records, ctx=ctx, blocks=[count])
    rng = np.random.default_rng(seed)
    for sizes in ([count], [1] * count, *(_cut(count, rng) for _ in range(rounds))):
        driven = drive(factory, records, ctx=ctx, blocks=sizes)
        told = _told(driven)
        if told != expected:
            raise AssertionError(f"in blocks of {sizes} (seed {seed}) it says {told}, record by record {expected}")
        if _bits(driven.scores) != _bits(whole.scores):
            raise AssertionError(f"in blocks of {sizes} (seed {seed}) scores differ from those of one block")


class _Feed:
    """Feeds one instance and notes what it says."""

    def __init__(self, probe: Probe, *, stop_at_abort: bool) -> None:
        self._probe = probe
        self._stop_at_abort = stop_at_abort
        self.signals: list[ProbeSignal] = []
        self.scores: dict[tuple[int, int], float] = {}
        self.fed = 0

    def records(self, records: Iterable[ActivationRecord]) -> None:
        """Feed record by record."""
        for record in records:
            signal = self._checked(self._probe.on_activation(record), "on_activation")
            self.fed += 1
            if signal is None:
                continue
            if signal.score is not None:
                self.scores[record.token_pos, record.layer] = float(signal.score)
            position = record.token_pos if signal.token_pos is None else signal.token_pos
            layer = record.layer if signal.layer is None else signal.layer
            self.signals.append(replace(signal, token_pos=position, layer=layer))
            if self._stops(signal):
                return

    def blocks(self, factory: ProbeFactory, grid: RecordGrid, blocks: BlockSizes) -> None:
        """Feed in blocks; the scores are asked of another instance, as a host does that scores many streams at once."""
        sample = _batch(factory)
        layers = wanted_layers(sample, grid.layers)
        columns = [grid.layers.index(layer) for layer in layers]
        positions = np.asarray(grid.positions, np.int32)
        for start, stop in spans(grid.sizes(blocks)):
            self.fed += (stop - start) * len(grid.layers)
            if not layers:
                continue
            rows = grid.values[start:stop, columns].reshape(-1, grid.values.shape[2])
            values = score_rows(sample, rows, lambda: np.tile(np.array(layers, np.int32), stop - start))  # noqa: B023
            scores = values.reshape(-1, len(layers), *values.shape[1:])
            places = positions[start:stop]
            for (row, column), score in np.ndenumerate(scores if scores.ndim == 2 else scores[:, :, 0]):
                self.scores[int(places[row]), layers[column]] = float(score)
            signal = self._checked(cast(BatchProbe, self._probe).on_scores(places, layers, scores), "on_scores")
            if signal is not None:
                self.signals.append(signal)
                if self._stops(signal):
                    return

    def _checked(self, answer: object, method: str) -> ProbeSignal | None:
        if answer is None or isinstance(answer, ProbeSignal):
            return answer
        name = f"{_name(self._probe)}.{method}"
        raise TypeError(f"{name} returned {type(answer).__name__}; accepted: a ProbeSignal or None")

    def _stops(self, signal: ProbeSignal) -> bool:
        return self._stop_at_abort and signal.action is ProbeAction.ABORT


def _factory(probe: AnyProbe, settings: Mapping[str, Any] | None, base: str | Path) -> ProbeFactory:
    if isinstance(probe, str):
        return load_probe(probe, settings, base=base).factory
    if isinstance(probe, ProbeFactory):
        return ProbeFactory(probe.probe_cls, {**probe.probe_kwargs, **(settings or {})}) if settings else probe
    if isinstance(probe, type) and issubclass(probe, Probe):
        return probe.factory(**(settings or {}))
    hint = ": pass its class, or a factory with its settings" if isinstance(probe, Probe) else ""
    raise TypeError(f"{type(probe).__name__} is no probe class, factory or name{hint}")


def _batch(factory: ProbeFactory) -> BatchProbe:
    sample = factory.spawn("", "")
    if not isinstance(sample, BatchProbe):
        raise TypeError(f"{_name(sample)} is no batch probe: it lacks score or on_scores")
    return sample


def _assert_rows_alone(sample: BatchProbe, grid: RecordGrid, seed: int) -> None:
    layers = wanted_layers(sample, grid.layers)
    if not layers:
        return
    columns = [grid.layers.index(layer) for layer in layers]
    rows = grid.values[:, columns].reshape(-1, grid.values.shape[2])
    of_rows = np.tile(np.array(layers, np.int32), len(grid.positions))

    def scored(which: NDArray[np.intp]) -> NDArray[np.float32]:
        return score_rows(sample, rows[which], lambda: of_rows[which])

    every = np.arange(len(rows))
    scores = scored(every)
    order = np.random.default_rng(seed).permutation(len(rows))
    if scored(order).tobytes() != scores[order].tobytes():
        raise AssertionError(f"score gives rows other scores in another order (seed {seed})")
    alone = np.concatenate([scored(every[at : at + 1]) for at in every])
    if alone.tobytes() != scores.tobytes():
        at = int(np.argmax((alone != scores).reshape(len(rows), -1).any(axis=1)))
        raise AssertionError(f"score gives row {at} {alone[at]!r} alone and {scores[at]!r} among {len(rows)} rows")


def _cut(count: int, rng: np.random.Generator) -> list[int]:
    cuts = np.flatnonzero(rng.random(count - 1) < rng.random()) + 1
    edges = [0, *(int(cut) for cut in cuts), count]
    return [stop - start for start, stop in pairwise(edges)]


def _told(driven: Driven) -> dict[str, Any]:
    """Return what a host would publish of it, apart from scores; metadata leaves as text."""
    return {
        "signals": [_published(signal) for signal in _rising(driven.actions)],
        "verdict": str(driven.result.verdict),
        "metadata": _words(driven.result.metadata),
    }


def _rising(signals: Iterable[ProbeSignal]) -> list[ProbeSignal]:
    kept: list[ProbeSignal] = []
    for signal in signals:
        if not kept or (kept[-1].action, signal.action) == (ProbeAction.FLAG, ProbeAction.ABORT):
            kept.append(signal)
    return kept


def _published(signal: ProbeSignal) -> dict[str, Any]:
    score = signal.confidence if signal.score is None else signal.score
    return {
        "action": signal.action.value,
        "token_pos": None if signal.token_pos is None else int(signal.token_pos),
        "layer": signal.layer,
        "score": None if score is None else float(score),
        "metadata": _words(signal.metadata),
    }


def _words(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in metadata.items()}


def _bits(scores: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], bytes]:
    # As bytes, since a NaN equals no NaN.
    return {place: np.float32(score).tobytes() for place, score in scores.items()}


def _name(probe: object) -> str:
    return type(probe).__qualname__
