"""`evaluate`: from scores and labels to a report."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.agreement import Agreement, agreements
from undercurrent.evaluation.calibration import calibrate
from undercurrent.evaluation.censoring import Censoring, censoring, selected_by_aborts, without_cut_labels
from undercurrent.evaluation.detection import Detection, fired_at, running, time_to_detection
from undercurrent.evaluation.figures import Figure, lacking, needs
from undercurrent.evaluation.findings import Findings, SplitFacts, WrongRequest
from undercurrent.evaluation.inputs import Values, known, labels_of, table_of
from undercurrent.evaluation.layers import layer_cells
from undercurrent.evaluation.lengths import by_length
from undercurrent.evaluation.notes import headline, notes
from undercurrent.evaluation.operating import OperatingPoint, operating_point, place_threshold
from undercurrent.evaluation.options import Evidence, Options
from undercurrent.evaluation.parting import parted
from undercurrent.evaluation.report import Report
from undercurrent.evaluation.resampling import Bootstrap, Sample, at_prevalence, auprc, auroc
from undercurrent.evaluation.rivals import Arena, rivals, shuffled_labels
from undercurrent.evaluation.slices import slices
from undercurrent.evaluation.token_figures import token_figures
from undercurrent.protocol.holdout import in_holdout

LISTED_WRONG = 20
NEGATIVES_PER_ODDS = 50
"""Negatives that a precision at a prevalence needs, for each negative beside one positive there."""


def evaluate(
    scores: Values,
    labels: Values,
    *,
    groups: Values | None = None,
    split: Values | Path | None = None,
    evidence: Evidence | None = None,
    options: Options | None = None,
) -> Report:
    """Return what a probe is worth, by request, on a part of the data that nothing was chosen on.

    Args:
        scores: one per request, after aggregation: by id (mapping, series), or a sequence.
        labels: True, False or None; or `positive`, `negative`, `unknown`. A request without one is unknown.
        groups: what never straddles the split (user, conversation, template); each request by itself if not given.
        split: part of each request (`fit`, `threshold`, `test`); or the file of a stored split, which is made if it is
            not there, and in which each reading of the test part is counted; or None: by hash of group.
        evidence: what else is known.
        options: what to report.

    Raises:
        EvaluationError: the data do not fit together; the message names the request and the field.
    """
    evidence, options = evidence or Evidence(), options or Options()
    table = table_of(scores, labels, groups, evidence.requests)
    if evidence.features is not None and len(evidence.features) != len(table):
        raise EvaluationError(f"features have {len(evidence.features):,} rows for {len(table):,} scores")
    if options.holdout_share is not None and "holdout" not in table:
        table["holdout"] = [in_holdout(name, options.holdout_share) for name in table["request_id"]]
    given = table
    selected = selected_by_aborts(table)
    table = without_cut_labels(table)
    table, facts, units = parted(
        table, split, selected, options, fits=_fits(table, evidence), test_reads=evidence.test_reads
    )
    weights = _weights(table)
    arena = _arena(table, units, weights, evidence, options)
    held = censoring(given, units, weights, options)
    left_out = int((selected & (table["part"] != "fit")).sum())
    agreed = agreements(given, units, evidence.other_labels, arena.bootstrap)
    return _report(arena, Context(evidence, options, facts, held, left_out, agreed), table)


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What goes into a report as it is.

    Args:
        evidence: as given.
        options: as given.
        facts: of the split.
        held: of cut requests and the holdout.
        selected: requests outside the holdout that aborts made useless.
        agreement: of other sources of labels.
    """

    evidence: Evidence
    options: Options
    facts: SplitFacts
    held: Censoring
    selected: int
    agreement: tuple[Agreement, ...]


def _report(arena: Arena, context: Context, table: pd.DataFrame) -> Report:
    options, test, placing = context.options, arena.part("test"), arena.part("threshold")
    sample, scores = arena.sample.only(test), arena.scores[test]
    operating = _operating(arena, sample, scores)
    main = operating[0].threshold if operating else None
    area = auroc(sample, scores, arena.bootstrap)
    calibration, chance = calibrate(arena.sample.only(placing), arena.scores[placing], sample, scores, options)
    tested = arena.table[test]
    lengths = tested["length"].to_numpy(np.float64) if "length" in tested else None
    wanted = operating[0].wanted_fpr if operating else None
    found = Findings(
        name=options.name,
        headline="",
        notes=(),
        split=context.facts,
        auroc=area,
        auprc=auprc(sample, scores, arena.bootstrap),
        auprc_at_prevalence=_auprc_at_prevalence(sample, scores, arena.bootstrap, options),
        operating=operating,
        calibration=calibration,
        lengths=by_length(sample, scores, lengths, main, wanted or options_fpr(options), options.confidence),
        detection=_detection(arena, test, main, context.evidence),
        baselines=rivals(arena, area) if options.baselines else (),
        controls=(shuffled_labels(arena),) if options.baselines else (),
        tokens=token_figures(context.evidence.labelled_tokens, tested["request_id"], sample, arena.bootstrap),
        censoring=context.held,
        agreement=context.agreement,
        layers=()
        if context.evidence.layers is None
        else layer_cells(context.evidence.layers, arena.table, arena.sample, test, arena.bootstrap),
        slices=() if main is None else slices(tested, options.slices, sample, scores >= main, options.confidence),
        wrong=() if main is None else _wrong(tested, sample, scores, main, options.with_text),
        settings=json.loads(json.dumps(dataclasses.asdict(options))),
    )
    said = tuple(notes(found, context.selected))
    found = dataclasses.replace(found, notes=said, headline=headline(found))
    return Report(found, _result_table(table, arena, chance, test), _token_scores(context, found))


def options_fpr(options: Options) -> float | None:
    """Return the false-positive rate that lengths are judged by where the deployed threshold states none."""
    return options.fpr_targets[0] if options.fpr_targets else None


def _fits(table: pd.DataFrame, evidence: Evidence) -> bool:
    return evidence.features is not None or bool({"prompt", "text", "length"} & set(table.columns))


def _weights(table: pd.DataFrame) -> np.ndarray:
    if "sampling_probability" not in table:
        return np.ones(len(table))
    weights = 1 / table["sampling_probability"].to_numpy(np.float64)
    return np.asarray(weights / weights.mean())


def _arena(table: pd.DataFrame, units: np.ndarray, weights: np.ndarray, evidence: Evidence, options: Options) -> Arena:
    chosen = known(table)
    labelled = table[chosen]
    scores = labelled["score"].to_numpy(np.float64)
    present = scores[np.isfinite(scores)]
    # Below every score and threshold, so that it ranks last and never acts.
    floor = min([*present, *([] if options.threshold is None else [options.threshold])], default=0.0)
    lowest = float(np.nextafter(floor, -np.inf))
    return Arena(
        table=labelled,
        sample=Sample(labels_of(labelled), units[chosen], weights[chosen]),
        parts=labelled["part"].to_numpy(),
        scores=np.where(np.isfinite(scores), scores, lowest),
        features=None if evidence.features is None else np.asarray(evidence.features)[chosen],
        options=options,
    )


def _operating(arena: Arena, sample: Sample, scores: np.ndarray) -> tuple[OperatingPoint, ...]:
    options, placing = arena.options, arena.part("threshold")
    points = []
    if options.threshold is not None:
        points.append(operating_point("deployed", float(options.threshold), sample, scores, options))
    for target in options.fpr_targets:
        threshold = place_threshold(arena.sample.only(placing), arena.scores[placing], target)
        points.append(operating_point(f"{target * 100:g} % FPR", threshold, sample, scores, options, target))
    return tuple(points)


def _auprc_at_prevalence(sample: Sample, scores: np.ndarray, bootstrap: Bootstrap, options: Options) -> Figure:
    if options.prevalence is None:
        return lacking("--prevalence")
    if sample.labels.all() or not sample.labels.any():
        return auprc(sample, scores, bootstrap)
    # Fewer negatives cannot show the false positives that the precision is made of there: it would come out near 1.
    least = math.ceil(NEGATIVES_PER_ODDS * (1 - options.prevalence) / options.prevalence)
    negatives = int((~sample.labels).sum())
    if negatives < least:
        return needs(least, "negatives", negatives)
    return auprc(at_prevalence(sample, options.prevalence), scores, bootstrap)


def _detection(arena: Arena, test: np.ndarray, threshold: float | None, evidence: Evidence) -> Detection:
    chosen = test & arena.sample.labels
    positives = arena.table[chosen]
    at = None
    if evidence.tokens is not None and threshold is not None:
        at = fired_at(evidence.tokens, positives, threshold)
        last = running(evidence.tokens).groupby("request_id", sort=False)["token_pos"].max()
        positives = positives.assign(last=last.reindex(positives["request_id"]).to_numpy(np.float64))
    return time_to_detection(
        positives,
        arena.sample.groups[chosen],
        arena.sample.weights[chosen],
        at,
        arena.options.abort_latency_tokens,
        arena.options.confidence,
    )


def _wrong(
    tested: pd.DataFrame, sample: Sample, scores: np.ndarray, threshold: float, with_text: bool
) -> tuple[WrongRequest, ...]:
    fired = scores >= threshold
    false_stops = np.flatnonzero(fired & ~sample.labels)
    misses = np.flatnonzero(~fired & sample.labels)
    texts = (
        tested["text"]
        if with_text and "text" in tested
        else tested["prompt"]
        if with_text and "prompt" in tested
        else None
    )

    def listed(kind: str, rows: np.ndarray) -> list[WrongRequest]:
        return [
            WrongRequest(
                request_id=str(tested["request_id"].iloc[row]),
                kind=kind,
                score=None if np.isnan(tested["score"].iloc[row]) else float(scores[row]),
                text=None if texts is None or not isinstance(texts.iloc[row], str) else texts.iloc[row],
            )
            for row in rows[:LISTED_WRONG]
        ]

    worst_first = false_stops[np.argsort(-scores[false_stops], kind="stable")]
    lowest_first = misses[np.argsort(scores[misses], kind="stable")]
    return (*listed("false stop", worst_first), *listed("miss", lowest_first))


def _result_table(table: pd.DataFrame, arena: Arena, chance: np.ndarray | None, test: np.ndarray) -> pd.DataFrame:
    """Return what `scores.parquet` holds: a row per request."""
    columns = ["request_id", "group", "part", "label", "score", *(["length"] if "length" in table else [])]
    result = table[columns].reset_index(drop=True)
    weight = pd.Series(arena.sample.weights, index=arena.table["request_id"].to_numpy())
    unit = pd.Series(arena.sample.groups, index=arena.table["request_id"].to_numpy())
    result["weight"] = weight.reindex(result["request_id"]).to_numpy()
    result["unit"] = unit.reindex(result["request_id"]).fillna(-1).to_numpy(np.int64)
    result["probability"] = np.nan
    if chance is not None:
        by_id = pd.Series(chance, index=arena.table["request_id"].to_numpy()[test])
        result["probability"] = by_id.reindex(result["request_id"]).to_numpy()
    return result


def _token_scores(context: Context, found: Findings) -> pd.DataFrame | None:
    """Return the tokens of the requests listed as wrong, if they may be shown."""
    tokens = context.evidence.tokens
    if tokens is None or not context.options.with_text or "token" not in tokens:
        return None
    return running(tokens[tokens["request_id"].astype(str).isin({row.request_id for row in found.wrong})])
