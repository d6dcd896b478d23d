"""What a probe has to beat, and what must not beat chance: baselines and controls, on the split of the probe itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from undercurrent.evaluation.baselines import length_scores, text_scores
from undercurrent.evaluation.figures import LEAST, Figure, lacking, needs
from undercurrent.evaluation.fitting import fit_logistic
from undercurrent.evaluation.metrics import Bools, Floats
from undercurrent.evaluation.operating import class_share, place_threshold
from undercurrent.evaluation.options import Options
from undercurrent.evaluation.resampling import Bootstrap, Sample, auroc, auroc_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A way to score the same requests.

    Args:
        name: what it is.
        kind: `text`, `length` or `control`.
        auroc: on the test part.
        tpr: at the first wanted false-positive rate, its threshold placed as the probe's.
        gain: AUROC of the probe minus its own, on the same resamples.
        within: whether its AUROC reaches the lower end of the probe's interval; None if either is not known.
    """

    name: str
    kind: str
    auroc: Figure
    tpr: Figure
    gain: Figure
    within: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The probe's recipe on labels that mean nothing.

    Args:
        name: what was done.
        auroc: on the test part; its interval must not lie above 0.5.
        passed: whether it does not; None if that is not known.
    """

    name: str
    auroc: Figure
    passed: bool | None


@dataclass(frozen=True, slots=True)
class Arena:
    """One split's requests with known labels.

    Args:
        table: the requests [n].
        sample: their labels, groups and weights.
        parts: part of each.
        scores: of the probe, [n].
        features: activation rows [n, width], or None.
        options: of the evaluation.
    """

    table: pd.DataFrame
    sample: Sample
    parts: np.ndarray
    scores: Floats
    features: Floats | None
    options: Options

    def part(self, name: str) -> Bools:
        """Return True for the requests of a part, [n]."""
        return np.asarray(self.parts == name, dtype=np.bool_)

    def fit_lacks(self) -> Figure | None:
        """Return why nothing can be fitted, or None."""
        fit = self.sample.only(self.part("fit"))
        for label, what in ((True, "positives in the fit part"), (False, "negatives in the fit part")):
            has = int((fit.labels == label).sum())
            if has < LEAST:
                return needs(LEAST, what, has)
        return None

    @property
    def bootstrap(self) -> Bootstrap:
        """How figures are resampled."""
        return Bootstrap(self.options.rounds, self.options.seed, self.options.confidence)


def rivals(arena: Arena, probe: Figure) -> tuple[Rival, ...]:
    """Return the baselines: n-grams of the prompt and of the text, length alone, a random direction."""
    read = "whole text" if arena.options.whole_texts else "text up to the decision"
    found = [
        _rival(arena, "n-grams of the prompt", "text", _text(arena, "prompt"), probe),
        _rival(arena, f"n-grams of the {read}", "text", _text(arena, "text"), probe),
        _rival(arena, "length alone", "length", _length(arena), probe),
        _rival(arena, "a random direction", "control", _random_direction(arena), probe),
    ]
    return tuple(found)


def shuffled_labels(arena: Arena) -> Control:
    """Return what a logistic regression on the probe's features makes of labels dealt out anew among groups.

    A group keeps one label wherever its requests stand: a fit that does better than chance on the test part has met
    those requests before. One that does worse has not: that is chance alone.
    """
    name = "the features with shuffled labels"
    if arena.features is None:
        return Control(name=name, auroc=lacking("features: one activation row per request"), passed=None)
    lacks = arena.fit_lacks()
    if lacks is not None:
        return Control(name=name, auroc=lacks, passed=None)
    rng = np.random.default_rng(arena.options.seed)
    found, members = np.unique(arena.sample.groups, return_inverse=True)
    majority = np.bincount(members, arena.sample.labels) / np.bincount(members) > 0.5
    dealt = rng.permutation(majority)[members] if found.size > 1 else majority[members]
    fit, test = arena.part("fit"), arena.part("test")
    if dealt[fit].all() or not dealt[fit].any():
        return Control(name=name, auroc=lacking("groups of both classes in the fit part"), passed=None)
    model = fit_logistic(arena.features[fit], dealt[fit])
    sample = Sample(dealt[test], arena.sample.groups[test], arena.sample.weights[test])
    figure = auroc(sample, model.scores(arena.features[test]).astype(np.float64), arena.bootstrap)
    passed = None if figure.low is None else figure.low <= 0.5
    return Control(name=name, auroc=figure, passed=passed)


def _rival(arena: Arena, name: str, kind: str, scores: Floats | Figure, probe: Figure) -> Rival:
    if isinstance(scores, Figure):
        return Rival(name=name, kind=kind, auroc=scores, tpr=scores, gain=scores, within=None)
    test, placing = arena.part("test"), arena.part("threshold")
    sample = arena.sample.only(test)
    figure = auroc(sample, scores[test], arena.bootstrap)
    within = None if figure.value is None or probe.low is None else bool(figure.value >= probe.low)
    return Rival(
        name=name,
        kind=kind,
        auroc=figure,
        tpr=_tpr(arena, scores, placing, test),
        gain=figure if figure.value is None else _gain(arena, sample, scores[test], test),
        within=within,
    )


def _tpr(arena: Arena, scores: Floats, placing: Bools, test: Bools) -> Figure:
    if not arena.options.fpr_targets:
        return lacking("a wanted false-positive rate")
    threshold = place_threshold(arena.sample.only(placing), scores[placing], arena.options.fpr_targets[0])
    if isinstance(threshold, Figure):
        return threshold
    return class_share(arena.sample.only(test), scores[test] >= threshold, True, arena.options.confidence)


def _gain(arena: Arena, sample: Sample, scores: Floats, test: Bools) -> Figure:
    own, other = auroc_rounds(sample.labels, arena.scores[test]), auroc_rounds(sample.labels, scores)
    return arena.bootstrap.figure(sample, lambda weights: own(weights) - other(weights))


def _text(arena: Arena, column: str) -> Floats | Figure:
    if column not in arena.table:
        return lacking(f"the column {column}")
    lacks = arena.fit_lacks()
    if lacks is not None:
        return lacks
    texts = [text if isinstance(text, str) else "" for text in arena.table[column]]
    fit = arena.part("fit")
    try:
        return text_scores(_chosen(texts, fit), arena.sample.labels[fit], texts)
    except ValueError as wrong:
        # Texts without a character in common have no vocabulary.
        return lacking(f"texts with something in common in the fit part ({wrong})")


def _length(arena: Arena) -> Floats | Figure:
    if "length" not in arena.table:
        return lacking("the column length")
    lengths = arena.table["length"].to_numpy(np.float64)
    if not np.isfinite(lengths).all():
        return lacking(f"the length of every request, {int((~np.isfinite(lengths)).sum()):,} have none")
    lacks = arena.fit_lacks()
    if lacks is not None:
        return lacks
    fit = arena.part("fit")
    return length_scores(lengths[fit], arena.sample.labels[fit], lengths)


def _random_direction(arena: Arena) -> Floats | Figure:
    if arena.features is None:
        return lacking("features: one activation row per request")
    lacks = arena.fit_lacks()
    if lacks is not None:
        return lacks
    fit = arena.part("fit")
    rows = arena.features.astype(np.float64)
    spread = rows[fit].std(axis=0)
    direction = np.random.default_rng(arena.options.seed).normal(size=rows.shape[1])
    scores = ((rows - rows[fit].mean(axis=0)) / np.where(spread > 0, spread, 1.0)) @ direction
    # The sign is all that it may learn, and it learns it where the probe did.
    labels = arena.sample.labels[fit]
    return np.asarray(scores if scores[fit][labels].mean() >= scores[fit][~labels].mean() else -scores)


def _chosen(texts: Sequence[str], chosen: Bools) -> list[str]:
    return [text for text, wanted in zip(texts, chosen, strict=True) if wanted]
