"""What a coarser recording costs a probe: its figures on the same requests, published in other ways.

    found = measure(probe, data, "residual", "harmful", Order(projections=(64, 16)))
    found.rows[1].auroc_change, found.rows[1].drift

Nothing is estimated: recorded rows go through the code that an engine publishes them with, and through the probe as a
host runs it. The unit is the request, after aggregation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.carrying import Carried, carry
from undercurrent.evaluation.comparing import auroc_gain, ranked
from undercurrent.evaluation.dataset import Dataset, RequestBlock
from undercurrent.evaluation.encodings import MODEL, Encoding
from undercurrent.evaluation.figures import Figure
from undercurrent.evaluation.inputs import POSITIVE, UNKNOWN
from undercurrent.evaluation.request_facts import sampling_probability
from undercurrent.evaluation.resampling import Bootstrap, Sample, auroc
from undercurrent.evaluation.scoring import score_requests
from undercurrent.probes.linear import LinearProbe
from undercurrent.probes.stored import StoredProbe

AnyStored = LinearProbe | StoredProbe

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to measure.

    Args:
        dtypes: element types beside the recorded one.
        projections: elements of randomly projected rows.
        seed: of the projections and of the intervals.
        split: part of the dataset that is scored.
        rounds: of the bootstrap.
    """

    dtypes: Sequence[str] = ("float16", "int8")
    projections: Sequence[int] = ()
    seed: int = 0
    split: str = "threshold"
    rounds: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far scores move, in units of their spread: the standard deviation of the recorded ones.

    Args:
        quantiles: of |score - recorded score| over requests, by share.
        most: the largest.
    """

    quantiles: Mapping[float, float]
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A probe on one way to publish its rows.

    Args:
        name: of the encoding.
        dtype: element type on the wire.
        width: elements of one (token, layer) on the wire.
        row_bytes: of one (token, layer) on the wire.
        unavailable: why there are no figures, None where there are.
        kept: of a projection: share of the variance of single rows' scores that the carried probe explains.
        auroc: on labelled requests.
        auroc_change: this AUROC minus the recorded one, on paired resamples.
        drift: of the scores; None where they do not vary, or none is left.
        acts_too: requests on which it acts and the recorded one does not.
        acts_no_more: requests on which the recorded one acts and it does not.
        failed: requests that the probe ends with an error, as it does where a value is not finite.
    """

    name: str
    dtype: str
    width: int
    row_bytes: int
    unavailable: str | None = None
    kept: float | None = None
    auroc: Figure | None = None
    auroc_change: Figure | None = None
    drift: Drift | None = None
    acts_too: int = 0
    acts_no_more: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What was measured.

    Args:
        recorded: element type of the dataset's rows.
        layers: that the probe reads.
        requests: that were scored.
        positives: of them, by their label.
        negatives: of them, by their label.
        spread: standard deviation of the recorded scores; NaN where fewer than two have one.
        acts: requests on which the probe acts as recorded.
        threshold: at which it acts.
        prompt_rows: recorded rows of each request's prompt.
        generated_rows: recorded rows of what each request generated.
        rows: a row per encoding, the recorded one first.
        carried: the counterparts on projections.
    """

    recorded: str
    layers: tuple[int, ...]
    requests: int
    positives: int
    negatives: int
    spread: float
    acts: int
    threshold: float
    prompt_rows: tuple[int, ...]
    generated_rows: tuple[int, ...]
    rows: tuple[Row, ...]
    carried: tuple[Carried, ...]


def measure(probe: AnyStored, data: Dataset, point: str, label: str, order: Order) -> Precision:
    """Measure a probe on recorded rows and on the same rows published in other ways.

    The fit split is read once if there are projections, the scored split once for each encoding.

    Raises:
        EvaluationError: the dataset's rows are not what the probe reads, or not what the model computed.
        DatasetError: there is no such point, label or split.
        ProbeError: a projection is not below the probe's width, or a row is not finite.
    """
    config = probe.artefact.config
    recorded = recorded_dtype(probe, data, point)

    def blocks(split: str) -> Iterator[RequestBlock]:
        return data.blocks(point, layers=config.all_layers, split=split, label=label)

    def scored(by: AnyStored, encoding: Encoding) -> pd.DataFrame:
        return score_requests(by, encoding.blocks(blocks(order.split)))

    as_recorded, truth = Encoding(MODEL), _Truth(data, label)
    base = score_requests(probe, truth.seen(blocks(order.split)))
    if base.empty:
        raise EvaluationError(f"{data.path}: split {order.split!r} has no request at point {point!r}")
    judge = _Judge(base, truth.table().loc[base.index], Bootstrap(rounds=order.rounds, seed=order.seed))
    facts = (recorded, probe.artefact.width)
    rows = [judge.row(as_recorded, *facts, base)]
    for encoding in map(Encoding, order.dtypes):
        rows.append(judge.row(encoding, *facts, scored(probe, encoding)))
    carried = carry(probe, blocks("fit"), order.projections, order.seed)
    for one in carried:
        found = None if one.probe is None else scored(one.probe, one.encoding)
        row = judge.row(one.encoding, *facts, found)
        rows.append(replace(row, kept=one.kept, unavailable=one.unavailable))
    return Precision(
        recorded=recorded,
        layers=config.all_layers,
        requests=len(base),
        positives=int(judge.sample.labels.sum()),
        negatives=int((~judge.sample.labels).sum()),
        spread=judge.spread,
        acts=int(judge.acts.sum()),
        threshold=config.threshold,
        prompt_rows=tuple(truth.prompt_rows),
        generated_rows=tuple(truth.generated_rows),
        rows=tuple(rows),
        carried=tuple(carried),
    )


def recorded_dtype(probe: AnyStored, data: Dataset, point: str) -> str:
    """Return the element type of a point's rows, which must be those that the model computed and the probe reads.

    Raises:
        DatasetError: there is no such point.
        EvaluationError: they are not.
    """
    data.layers(point)
    config, where = probe.artefact.config, f"{data.path}: point {point!r}"
    kinds = data.manifest["points"][point]
    for what, mine in (("tensor_type", config.tensor_type.value), ("width", probe.artefact.width)):
        theirs = sorted({kind[what] for kind in kinds})
        if theirs != [mine]:
            said = ", ".join(map(str, theirs)) or "no rows"
            raise EvaluationError(f"{where}: {what} is {said}; the probe {config.name!r} reads {mine}")
    dtypes = sorted({kind["dtype"] for kind in kinds})
    if len(dtypes) > 1 or dtypes == ["int8"]:
        raise EvaluationError(
            f"{where}: recorded as {' and '.join(dtypes)}; accepted: a recording in the model's own element type "
            f"(dtype: model), since nothing else can be made of a coarser one"
        )
    return str(dtypes[0])


class _Truth:
    """Notes what is known of the requests that pass by.

    Args:
        data: has the labels.
        label: name of the label.
    """

    def __init__(self, data: Dataset, label: str) -> None:
        judged = data.labels[data.labels["name"] == label]
        self._none = judged.iloc[:0]
        self._by_request = dict(iter(judged.groupby("request_id")))
        self._rows: dict[str, tuple[str, str, float]] = {}
        self.prompt_rows: list[int] = []
        self.generated_rows: list[int] = []

    def seen(self, blocks: Iterable[RequestBlock]) -> Iterator[RequestBlock]:
        """Yield requests as they come."""
        for block in blocks:
            chance = sampling_probability(self._by_request.get(block.request_id, self._none))
            self._rows[block.name] = block.label, block.group, 1.0 / chance
            generated = int(block.is_generated.sum())
            self.generated_rows.append(generated)
            self.prompt_rows.append(len(block.positions) - generated)
            yield block

    def table(self) -> pd.DataFrame:
        """Return label, group and weight of each request, by its name."""
        return pd.DataFrame.from_dict(self._rows, orient="index", columns=["label", "group", "weight"])


class _Judge:
    """Compares scores with the recorded ones.

    Args:
        base: the recorded ones.
        truth: label, group and weight of the same requests.
        bootstrap: of the intervals.
    """

    def __init__(self, base: pd.DataFrame, truth: pd.DataFrame, bootstrap: Bootstrap) -> None:
        self._base = base
        self._known = (truth["label"] != UNKNOWN).to_numpy()
        self._bootstrap = bootstrap
        told = truth[self._known]
        labels = np.asarray(told["label"] == POSITIVE, dtype=np.bool_)
        units = pd.factorize(told["group"])[0].astype(np.int64)
        self.sample = Sample(labels, units, told["weight"].to_numpy(np.float64))
        self.acts = base["decided_at"].notna().to_numpy()
        present = base["score"].to_numpy(np.float64)
        present = present[np.isfinite(present)]
        self.spread = float(present.std()) if present.size > 1 else float("nan")

    def row(self, encoding: Encoding, recorded: str, width: int, found: pd.DataFrame | None) -> Row:
        """Return the figures of an encoding, without those of scores where there are none."""
        row = Row(
            name=recorded if encoding.dtype == MODEL and encoding.projection is None else encoding.name,
            dtype=encoding.wire_dtype(recorded),
            width=encoding.width(width),
            row_bytes=encoding.row_bytes(recorded, width),
        )
        if found is None:
            return row
        same = found is self._base
        found = found.loc[self._base.index]
        acts = found["decided_at"].notna().to_numpy()
        mine, theirs = (ranked(frame[self._known]) for frame in (found, self._base))
        return replace(
            row,
            auroc=auroc(self.sample, mine, self._bootstrap),
            auroc_change=None if same else auroc_gain(self.sample, mine, theirs, self._bootstrap),
            drift=self._drift(found),
            acts_too=int((acts & ~self.acts).sum()),
            acts_no_more=int((self.acts & ~acts).sum()),
            failed=int((found["error"] != "").sum()),
        )

    def _drift(self, found: pd.DataFrame) -> Drift | None:
        moved = (found["score"] - self._base["score"]).abs().to_numpy(np.float64)
        moved = moved[np.isfinite(moved)]
        if not moved.size or not self.spread > 0:
            return None
        moved /= self.spread
        quantiles = {share: float(value) for share, value in zip(QUANTILES, np.quantile(moved, QUANTILES), strict=True)}
        return Drift(quantiles=quantiles, most=float(moved.max()))
