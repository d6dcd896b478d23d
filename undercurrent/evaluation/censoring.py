"""Requests that were cut: whose outcome nobody saw, and the holdout from which what a probe saves can be told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from undercurrent.evaluation.figures import LEAST, Figure, Ints, needs, not_identifiable, share
from undercurrent.evaluation.inputs import POSITIVE, UNKNOWN
from undercurrent.evaluation.metrics import Bools, Floats
from undercurrent.evaluation.options import Options
from undercurrent.evaluation.resampling import Bootstrap, Sample, mean_rounds

NO_HOLDOUT = "needs a holdout: requests that run to their end with stops recorded and not applied"
UNLIKELY = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Censoring:
    """What was cut, and what the holdout tells.

    Args:
        cut: requests by outcome that were cut and not judged otherwise; their outcome is unknown.
        labels_dropped: labels of such requests, which are not used.
        aborted_outside: requests outside a holdout whose outcome an abort hid.
        holdout: requests of the holdout.
        holdout_cut: of them, ended by an abort all the same.
        holdout_share: of all requests.
        holdout_as_stated: False where that is not the share that was stated.
        would_stop: share of requests that the probe would have stopped.
        false_stops: share of negatives that it would have stopped.
        false_among_stops: share of negatives among its stops.
        tokens_saved: per request, tokens that a stop would have spared.
    """

    cut: dict[str, int]
    labels_dropped: int
    aborted_outside: int
    holdout: int
    holdout_cut: int
    holdout_share: float | None
    holdout_as_stated: bool | None
    would_stop: Figure
    false_stops: Figure
    false_among_stops: Figure
    tokens_saved: Figure


def without_cut_labels(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the label of a request that was cut unknown, unless it was judged otherwise."""
    return table.assign(label=np.where(_cut(table), UNKNOWN, table["label"]))


def selected_by_aborts(table: pd.DataFrame) -> Bools:
    """Return True for the requests [n] that may not be used since their fellows were taken out by aborts.

    Where a deployed probe aborted requests, those that it spared are a selection by the very score under test. The
    holdout is none.
    """
    if "holdout" not in table or "outcome" not in table or not _hidden_by_abort(table).any():
        return np.zeros(len(table), dtype=np.bool_)
    return np.asarray(~table["holdout"], dtype=np.bool_)


def censoring(table: pd.DataFrame, units: Ints, weights: Floats, options: Options) -> Censoring:
    """Return what was cut and what the holdout tells.

    Args:
        table: the requests with their labels as given.
        units: code of each one's group, [n].
        weights: of each, [n].
        options: of the evaluation.
    """
    cut = _cut(table)
    held = table["holdout"].to_numpy(np.bool_) if "holdout" in table else np.zeros(len(table), dtype=np.bool_)
    aborted = np.asarray(table["outcome"] == "aborted") if "outcome" in table else np.zeros(len(table), dtype=np.bool_)
    count = int(held.sum())
    figures = _estimates(table, units, weights, held & ~cut & _seen(table), options) if count else None
    none = not_identifiable(NO_HOLDOUT)
    return Censoring(
        cut={str(name): int(n) for name, n in table["outcome"][cut].value_counts().items()} if cut.any() else {},
        labels_dropped=int((cut & np.asarray(table["label"] != UNKNOWN)).sum()),
        aborted_outside=int((_hidden_by_abort(table) & ~held).sum()),
        holdout=count,
        holdout_cut=int((held & aborted).sum()),
        holdout_share=count / len(table) if count else None,
        holdout_as_stated=_as_stated(count, len(table), options.holdout_share),
        would_stop=figures[0] if figures else none,
        false_stops=figures[1] if figures else none,
        false_among_stops=figures[2] if figures else none,
        tokens_saved=figures[3] if figures else none,
    )


def _cut(table: pd.DataFrame) -> Bools:
    if "outcome" not in table:
        return np.zeros(len(table), dtype=np.bool_)
    judged = table["judged"].to_numpy(np.bool_) if "judged" in table else False
    return np.asarray((table["outcome"] != "complete").to_numpy() & ~np.asarray(judged), dtype=np.bool_)


def _hidden_by_abort(table: pd.DataFrame) -> Bools:
    if "outcome" not in table:
        return np.zeros(len(table), dtype=np.bool_)
    return np.asarray(_cut(table) & (table["outcome"] == "aborted").to_numpy(), dtype=np.bool_)


def _seen(table: pd.DataFrame) -> Bools:
    return np.ones(len(table), dtype=np.bool_) if "outcome" not in table else np.asarray(table["outcome"] != "lost")


def _as_stated(count: int, n: int, stated: float | None) -> bool | None:
    return None if stated is None or not count else bool(binomtest(count, n, stated).pvalue >= UNLIKELY)


def _estimates(
    table: pd.DataFrame, units: Ints, weights: Floats, chosen: Bools, options: Options
) -> tuple[Figure, Figure, Figure, Figure]:
    """Return would_stop, false_stops, false_among_stops and tokens_saved of the holdout.

    A request of the holdout that ran into max_tokens counts for tokens: it is as long as it would have been. Its label
    counts only if it was judged.
    """
    if "stop_at" not in table:
        why = Figure(value=None, unavailable="n/a (needs the column stop_at)")
        return why, why, why, why
    held = table["holdout"].to_numpy(np.bool_)
    ran = held & (np.ones(len(table), dtype=np.bool_) if "outcome" not in table else _ran(table))
    stop_at = table["stop_at"].to_numpy(np.float64)
    stopped = np.isfinite(stop_at)
    known = chosen & np.asarray(table["label"] != UNKNOWN)
    negative = known & np.asarray(table["label"] != POSITIVE)
    confidence = options.confidence
    false_stops = share(stopped[negative], units[negative], weights[negative], confidence=confidence)
    acted = known & stopped
    return (
        share(stopped[ran], units[ran], weights[ran], confidence=confidence),
        false_stops if int(negative.sum()) >= LEAST else needs(LEAST, "negatives in the holdout", int(negative.sum())),
        share(negative[acted], units[acted], weights[acted], confidence=confidence)
        if int(acted.sum()) >= LEAST
        else needs(LEAST, "stops in the holdout", int(acted.sum())),
        _tokens_saved(table, units, weights, ran, stop_at, options),
    )


def _ran(table: pd.DataFrame) -> Bools:
    return np.asarray(table["outcome"].isin(["complete", "max_tokens"]), dtype=np.bool_)


def _tokens_saved(
    table: pd.DataFrame, units: Ints, weights: Floats, ran: Bools, stop_at: Floats, options: Options
) -> Figure:
    if "length" not in table:
        return Figure(value=None, unavailable="n/a (needs the column length)")
    lengths = table["length"].to_numpy(np.float64)
    ran = ran & np.isfinite(lengths)
    stops = int((ran & np.isfinite(stop_at)).sum())
    if stops < LEAST:
        return needs(LEAST, "stops in the holdout", stops)
    latency = options.abort_latency_tokens or 0
    saved = np.where(np.isfinite(stop_at), np.maximum(lengths - stop_at - latency, 0), 0.0)[ran]
    sample = Sample(np.zeros(saved.size, dtype=np.bool_), units[ran], weights[ran])
    return Bootstrap(options.rounds, options.seed, options.confidence).figure(sample, mean_rounds(saved))
