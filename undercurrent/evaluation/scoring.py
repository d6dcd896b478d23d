"""What a probe says of recorded requests: the scores, and the token at which it acts, that a host would have seen.

    frame = score_requests("probes/guard", data.blocks("residual", layers=(12,)))
    frame.loc["request-1", ["score", "decided_at"]]

The probe's own code does all of it: the same arithmetic, the positions that count, the aggregation, gaps and refusals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from numbers import Real
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from undercurrent.core import BatchProbe, Probe, ProbeSignal, RequestContext, StreamFacts, score_rows, wanted_layers
from undercurrent.errors import ProbeError, ShapeError
from undercurrent.evaluation.dataset import RequestBlock
from undercurrent.probes import LoadedProbe, load_probe
from undercurrent.probes.loading import loaded_probe
from undercurrent.probes.trajectory import Followed, TrajectoryProbe
from undercurrent.spec import ActivationRecord, TensorType

AnyProbe = str | Path | LoadedProbe | TrajectoryProbe
"""A folder, `module:Class` or a registered name; or what was loaded or made of one."""

COLUMNS = ("request_id", "attempt", "index", "score", "decided_at", "tokens", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRequest:
    """What a probe says of one request.

    Args:
        name: of the request in figures, see `RequestBlock.name`.
        request_id: the request.
        attempt: its attempt.
        index: its child.
        score: the highest aggregate that it ever reached: the probe acts exactly if that is its threshold or more. NaN
            where there is none.
        decided_at: absolute position at which the probe first acts; None where it never does.
        tokens: those that counted.
        error: why the probe refused or raised; empty if it did neither. What it had reached before that stands.
        positions: of the tokens that counted, int32 [m].
        scores: of each token, float32 [m].
        aggregates: after each token, float64 [m], -inf where there is none yet; of a probe that keeps none, NaN.
    """

    name: str
    request_id: str
    attempt: int
    index: int
    score: float
    decided_at: int | None
    tokens: int
    error: str
    positions: NDArray[np.int32]
    scores: NDArray[np.float32]
    aggregates: NDArray[np.float64]


def score_requests(probe: AnyProbe, blocks: Iterable[RequestBlock], *, keep_tokens: bool = False) -> pd.DataFrame:
    """Run a probe over recorded requests, one after the other.

    Args:
        probe: folder, `module:Class`, registered name, or a probe.
        blocks: of a dataset at the probe's point.
        keep_tokens: also give what each token scored, as columns of arrays: `token_positions`, `token_scores` and
            `token_aggregates`; see `ScoredRequest`.

    Returns:
        A row per request, by its name (`RequestBlock.name`): request_id, attempt, index, score, decided_at (Int64),
        tokens, error. See `ScoredRequest`.

    Raises:
        ProbeError: the probe does not load, or a request comes twice.
    """
    rows: dict[str, dict[str, Any]] = {}
    for found in scored(probe, blocks):
        if found.name in rows:
            raise ProbeError(f"request {found.name!r} comes twice; accepted: the attempt that counts, as one block")
        rows[found.name] = {name: getattr(found, name) for name in COLUMNS}
        if keep_tokens:
            rows[found.name] |= {
                "token_positions": found.positions,
                "token_scores": found.scores,
                "token_aggregates": found.aggregates,
            }
    columns = [*COLUMNS, *(("token_positions", "token_scores", "token_aggregates") if keep_tokens else ())]
    frame = pd.DataFrame(list(rows.values()), index=pd.Index(list(rows), name="request", dtype=object), columns=columns)
    return frame.astype({"score": np.float64, "decided_at": "Int64", "tokens": np.int64, "attempt": np.int64})


def scored(probe: AnyProbe, blocks: Iterable[RequestBlock]) -> Iterator[ScoredRequest]:
    """Yield what a probe says of each recorded request; nothing of one is kept for the next.

    Raises:
        ProbeError: the probe does not load.
    """
    loaded = as_loaded(probe)
    for block in blocks:
        yield score_request(loaded, block)


def score_request(loaded: LoadedProbe, block: RequestBlock) -> ScoredRequest:
    """Return what a probe says of one recorded request."""
    facts = stream_of(block)
    try:
        loaded.check(facts)
    except ProbeError as exc:
        return _made(block, Followed(*_NOTHING), None, math.nan, str(exc))
    if isinstance(loaded.sample, TrajectoryProbe):
        return _trajectory(loaded, block, facts)
    return _other(loaded, block, facts)


def as_loaded(probe: AnyProbe) -> LoadedProbe:
    """Return a probe ready to run.

    Raises:
        ProbeError: it does not load.
    """
    if isinstance(probe, LoadedProbe):
        return probe
    return loaded_probe(probe) if isinstance(probe, TrajectoryProbe) else load_probe(str(probe))


def stream_of(block: RequestBlock) -> StreamFacts:
    """Return the facts of a block's stream: those that were recorded, else what the block itself shows."""
    if block.stream is not None:
        return block.stream
    generated = block.positions[block.is_generated]
    past = int(block.positions[-1]) + 1 if len(block.positions) else 0
    rows = next(iter(block.rows.values()), np.empty((0, 0), np.float32))
    return StreamFacts(
        prompt_len=int(generated[0]) if generated.size else past,
        layers=tuple(block.rows),
        width=int(rows.shape[1]),
        tensor_type=TensorType.RESIDUAL_STREAM.value,
        dtype=rows.dtype.name,
    )


_NOTHING = (np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.float64))


def _trajectory(loaded: LoadedProbe, block: RequestBlock, facts: StreamFacts) -> ScoredRequest:
    probe = cast(TrajectoryProbe, _spawned(loaded, block, facts))
    threshold, error = probe.artefact.config.threshold, ""
    try:
        layers, scores = _row_scores(loaded, block)
        followed = probe.follow(block.positions, layers, scores)
    except (ProbeError, ShapeError) as exc:
        error = str(exc)
        followed = _up_to_the_error(cast(TrajectoryProbe, _spawned(loaded, block, facts)), loaded, block, facts)
    reached = np.flatnonzero(followed.aggregates >= threshold)
    decided_at = int(followed.positions[reached[0]]) if reached.size else None
    highest = float(followed.aggregates.max(initial=-math.inf))
    return _made(block, followed, decided_at, highest if math.isfinite(highest) else math.nan, error)


def _up_to_the_error(probe: TrajectoryProbe, loaded: LoadedProbe, block: RequestBlock, facts: StreamFacts) -> Followed:
    """Return what a probe had made of a request before it raised, fed as an engine's steps would: it may have acted."""
    parts = [Followed(*_NOTHING)]
    try:
        layers, scores = _row_scores(loaded, block)
        for start, stop in _steps(block, facts):
            parts.append(probe.follow(block.positions[start:stop], layers, scores[start:stop]))
    except (ProbeError, ShapeError):
        pass  # the caller has it
    return Followed(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _other(loaded: LoadedProbe, block: RequestBlock, facts: StreamFacts) -> ScoredRequest:
    """Return what a probe says that keeps no aggregate: by its signals, and by its result's own score."""
    tell = _batch_signals if loaded.batch is not None else _record_signals
    positions: list[int] = []
    scores: list[float] = []
    decided_at, final, error = None, math.nan, ""
    context = RequestContext(block.request_id, stream=facts)
    try:
        probe = _spawned(loaded, block, facts)
        for position, signal in tell(probe, loaded, block, facts):
            positions.append(position)
            scores.append(math.nan if signal is None or signal.score is None else float(signal.score))
            if decided_at is None and signal is not None and signal.acts:
                decided_at = position if signal.token_pos is None else int(signal.token_pos)
        said = probe.on_end(context).metadata.get("score")
        final = float(said) if isinstance(said, Real) else math.nan
    except Exception as exc:  # a probe's own code may raise anything; it ends for that request alone, as in a host
        error = str(exc) if isinstance(exc, ProbeError) else f"{type(exc).__name__}: {exc}"
    finite = [score for score in scores if math.isfinite(score)]
    score = final if math.isfinite(final) else max(finite, default=math.nan)
    followed = Followed(
        np.array(positions, np.int32), np.array(scores, np.float32), np.full(len(positions), np.nan, np.float64)
    )
    return _made(block, followed, decided_at, score, error)


def _batch_signals(
    probe: Probe, loaded: LoadedProbe, block: RequestBlock, facts: StreamFacts
) -> Iterator[tuple[int, ProbeSignal | None]]:
    layers, scores = _row_scores(loaded, block)
    for start, stop in _steps(block, facts) if layers else ():
        signal = cast(BatchProbe, probe).on_scores(block.positions[start:stop], layers, scores[start:stop])
        yield int(block.positions[stop - 1]), signal


def _record_signals(
    probe: Probe, loaded: LoadedProbe, block: RequestBlock, facts: StreamFacts
) -> Iterator[tuple[int, ProbeSignal | None]]:
    shape = facts.row_shape or (-1,)
    for start, stop in _steps(block, facts):
        for layer, rows in block.rows.items():
            if not np.isfinite(rows[start:stop].astype(np.float32)).all():
                raise ProbeError(f"a value at layer {layer} from token {block.positions[start]} on is not finite")
        for at, (layer, rows) in product(range(start, stop), block.rows.items()):
            position = int(block.positions[at])
            record = ActivationRecord(
                request_id=block.request_id,
                extraction_point_name=probe.extraction_point_name,
                layer=layer,
                token_pos=position,
                tensor_type=TensorType(facts.tensor_type),
                tensor=rows[at].reshape(shape),
                is_generated=position >= facts.prompt_len,
            )
            yield position, probe.on_activation(record)


def _spawned(loaded: LoadedProbe, block: RequestBlock, facts: StreamFacts) -> Probe:
    probe = loaded.factory.spawn(block.request_id, loaded.point or "")
    probe.on_start(RequestContext(block.request_id, stream=facts))
    return probe


def _row_scores(loaded: LoadedProbe, block: RequestBlock) -> tuple[tuple[int, ...], NDArray[np.float32]]:
    """Return the layers that the probe reads and the scores of their rows, float32 [n, L] or [n, L, C]."""
    batch, count = loaded.batch, len(block.positions)
    layers = wanted_layers(loaded.sample, tuple(block.rows))
    if batch is None or not layers:
        return layers, np.empty((count, 0), np.float32)
    stacked = block.rows[layers[0]] if len(layers) == 1 else np.stack([block.rows[layer] for layer in layers], axis=1)
    rows = stacked.reshape(-1, stacked.shape[-1])
    values = score_rows(batch, rows, lambda: np.tile(np.array(layers, np.int32), count))
    return layers, values.reshape(count, len(layers), *values.shape[1:])


def _steps(block: RequestBlock, facts: StreamFacts) -> list[tuple[int, int]]:
    """Return the pieces that an engine would have captured: the prompt at once, then token by token."""
    prompt, count = int(np.searchsorted(block.positions, facts.prompt_len)), len(block.positions)
    return [(0, prompt)] * (prompt > 0) + [(at, at + 1) for at in range(prompt, count)]


def _made(block: RequestBlock, followed: Followed, decided_at: int | None, score: float, error: str) -> ScoredRequest:
    return ScoredRequest(
        name=block.name,
        request_id=block.request_id,
        attempt=block.attempt,
        index=block.index,
        score=score,
        decided_at=decided_at,
        tokens=np.unique(followed.positions).size,  # a probe that keeps no aggregate has an entry per layer
        error=error,
        positions=followed.positions,
        scores=followed.scores,
        aggregates=followed.aggregates,
    )
