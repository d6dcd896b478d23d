"""What a reader must know before acting on a report's figures, in plain words."""

from __future__ import annotations

from collections.abc import Iterator

from scipy.stats import chi2_contingency

from undercurrent.counts import counted
from undercurrent.evaluation.figures import brief
from undercurrent.evaluation.findings import Findings, PartCounts
from undercurrent.evaluation.operating import OperatingPoint

SURE = 0.001
CHANCE = 0.5
FAR_FROM_PREVALENCE = 2.0
"""Factor between the test part's share of positives and the stated one from which it is pointed out."""


def headline(found: Findings) -> str:
    """Return the first line: whether text alone does as well, else the figures at the first threshold."""
    text = [rival for rival in found.baselines if rival.kind == "text" and rival.auroc.value is not None]
    best = max(text, key=lambda rival: rival.auroc.value or 0.0, default=None)
    if best is not None and best.within:
        return (
            f"Text alone does as well: {best.name} reach AUROC {best.auroc}, "
            f"within the interval of the probe's {found.auroc}."
        )
    rank = f"AUROC {found.auroc}"
    if found.auroc.value is None:
        return f"{rank}: too few requests to judge by."
    if found.auroc.low is not None and found.auroc.low <= CHANCE:
        return f"Nothing shows that the probe ranks better than chance: {rank}. {_acts(found)}".rstrip()
    acts = _acts(found)
    return f"{acts[:-1]}; {rank}." if acts else f"{rank}; no threshold was asked for."


def _acts(found: Findings) -> str:
    """Return what the probe does at the first threshold, empty without one."""
    if not found.operating:
        return ""
    point = found.operating[0]
    if point.threshold is None:
        return f"At {point.name}: {point.tpr}."
    said = f"At the threshold for {point.name}" if point.wanted_fpr is not None else "At the deployed threshold"
    return f"{said} the probe acts on {point.tpr} of positives and {point.fpr} of negatives."


def notes(found: Findings, selected: int) -> Iterator[str]:
    """Yield what qualifies the figures, gravest first.

    Args:
        found: the figures.
        selected: requests outside the holdout that aborts made useless.
    """
    yield from _controls(found)
    yield from _cut(found, selected)
    yield from _split(found)
    for point in found.operating:
        yield from _operating(point)
    yield from _rivals(found)
    yield from _lengths(found)
    yield from _prevalence(found)
    yield from _calibration(found)
    yield from _slices(found)
    yield from _data(found)


def _controls(found: Findings) -> Iterator[str]:
    for control in found.controls:
        if control.passed is False:
            yield (
                f"LEAKAGE: {control.name} reach AUROC {control.auroc}, which lies above 0.5: the test part holds "
                f"requests that the fit has met, and no figure here can be trusted. A few clean splits in a hundred "
                f"come to this by chance: see whether they do with another seed."
            )
    for rival in found.baselines:
        if rival.kind == "control" and rival.within:
            yield f"{rival.name} reaches AUROC {rival.auroc}, within the probe's interval: its direction adds nothing."


def _cut(found: Findings, selected: int) -> Iterator[str]:
    held = found.censoring
    if held.holdout_cut:
        yield (
            f"{counted(held.holdout_cut, 'request of the holdout was', 'requests of the holdout were')} aborted all "
            f"the same: its figures mislead."
        )
    if held.holdout_as_stated is False:
        yield (
            f"The holdout is {held.holdout_share or 0:.1%} of the requests, which is not what was stated: "
            f"it may be no random part of them."
        )
    if held.cut:
        kinds = ", ".join(f"{n:,} {name}" for name, n in sorted(held.cut.items()))
        yield (
            f"The outcome of {counted(sum(held.cut.values()), 'request that was', 'requests that were')} cut ({kinds}) "
            f"is unknown; {counted(held.labels_dropped, 'label')} of such requests not used."
        )
    if selected:
        yield (
            f"Aborts took requests out by their score, so those they spared are no fair sample: figures are of the "
            f"holdout alone, {counted(selected, 'other request is', 'other requests are')} not used."
        )
    elif held.aborted_outside:
        yield (
            f"{counted(held.aborted_outside, 'request was', 'requests were')} aborted and not judged, and there is no "
            f"holdout: the rates are those of the requests that were spared. Of the traffic as a whole they are "
            f"not identifiable."
        )


def _split(found: Findings) -> Iterator[str]:
    split = found.split
    if split.left_across:
        yield (
            f"LEAKAGE: {counted(split.left_across, 'request shares its', 'requests share their')} group or text with "
            f"another part, left there as asked; figures of the test part are too good."
        )
    if split.moved:
        yield (
            f"{counted(split.moved, 'request was', 'requests were')} moved to the earlier part, since group or text "
            f"stood in two: {counted(split.groups_across, 'group')}, "
            f"{counted(split.exact_across, 'request')} with the same text, "
            f"{split.near_across:,} that shared 13 words in a row (the same ones among them)."
        )
    total = sum(part.requests + part.unknown for part in split.parts)
    if split.largest_unit > 0.1 * total and split.largest_unit > 1:
        together = f"{split.largest_unit:,} of {counted(total, 'request')}"
        yield f"{together} hang together by group or text and could not be parted."
    if split.common_passages:
        yield (
            f"{counted(split.common_passages, 'passage stands', 'passages stand')} in over 5 % of the requests, taken "
            f"for a template's."
        )
    if not split.texts_compared:
        yield "No texts were given: duplicates could not be looked for."
    if split.source == "by group hash":
        yield "No split was given: the figures hold only if the probe was fitted on none of these requests."
    if split.test_reads is not None and split.test_reads > 1:
        yield f"This test part has been read {split.test_reads:,} times: what was chosen by it looks too good on it."


def _operating(point: OperatingPoint) -> Iterator[str]:
    if point.holds is False:
        yield f"The threshold for {point.name} does not hold on the test part: {point.fpr} of negatives are acted on."


def _rivals(found: Findings) -> Iterator[str]:
    for rival in found.baselines:
        if rival.kind != "control" and rival.within:
            yield f"{rival.name}: AUROC {rival.auroc}, within the interval of the probe's {found.auroc}."


def _lengths(found: Findings) -> Iterator[str]:
    lengths = found.lengths
    if not lengths.effect:
        return
    text = "Length moves the score of negatives"
    if lengths.score_correlation is not None:
        text += f" (rank correlation {lengths.score_correlation:.2f})"
    if lengths.bands:
        first, last = lengths.bands[0], lengths.bands[-1]
        text += f": of the shortest quarter {first.fpr} are acted on, of the longest {last.fpr}"
    if lengths.holds_up_to is not None:
        text += f"; the threshold is known to hold up to {counted(lengths.holds_up_to, 'token')}"
    yield f"{text}."


def _prevalence(found: Findings) -> Iterator[str]:
    counts = {part.part: (part.positives, part.negatives) for part in found.split.parts}
    used = {name: pair for name, pair in counts.items() if sum(pair) and name in ("threshold", "test")}
    if len(used) == 2 and all(sum(column) for column in zip(*used.values(), strict=True)):
        shares = {name: pair[0] / sum(pair) for name, pair in used.items()}
        if chi2_contingency(list(used.values())).pvalue < SURE:
            yield (
                f"The share of positives differs between threshold part ({shares['threshold']:.1%}) and test part "
                f"({shares['test']:.1%}): probabilities fitted on the one are off on the other."
            )
    stated, test = found.settings["prevalence"], counts.get("test", (0, 0))
    if stated is None or not sum(test):
        return
    share = test[0] / sum(test)
    if not stated / FAR_FROM_PREVALENCE <= share <= stated * FAR_FROM_PREVALENCE:
        yield (
            f"{share:.1%} of the test part are positives, {stated:.3%} of the traffic as stated: AUPRC, Brier and ECE "
            f"are of the test part; precision, counts per day and the AUPRC at the prevalence are of the traffic."
        )


def _calibration(found: Findings) -> Iterator[str]:
    error, chance = found.calibration.ece.value, found.calibration.ece_by_chance
    if error is not None and chance is not None and error > chance:
        yield f"Probabilities are off: calibration error (ECE) {brief(error)}, by chance it is up to {brief(chance)}."


def _slices(found: Findings) -> Iterator[str]:
    for part in found.slices:
        if part.flagged:
            where = f"{part.column} is {part.value} (n = {part.n:,})"
            yield f"Worse than on the rest where {where}: TPR {part.tpr}, FPR {part.fpr}."


def _data(found: Findings) -> Iterator[str]:
    parts = [part for part in found.split.parts if part.part in ("threshold", "test")]
    unscored = sum(part.unscored for part in parts)
    if unscored:
        bare = counted(unscored, "request has no score and counts", "requests have no score and count")
        yield f"{bare} as not acted on."
    for part in parts:
        yield from _weighted(part)


def _weighted(part: PartCounts) -> Iterator[str]:
    if part.requests and part.effective_n < 0.999 * part.requests:
        yield (
            f"The {part.requests:,} requests of the {part.part} part weigh unequally "
            f"and say as much as {part.effective_n:,.0f} of a plain sample."
        )
