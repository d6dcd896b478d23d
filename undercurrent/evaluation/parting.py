"""The parts of an evaluation: as given, as stored, or by hash of group, and what became of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.dataset_split import PARTS, SplitRule, group_hash
from undercurrent.evaluation.figures import Ints, kish
from undercurrent.evaluation.findings import PartCounts, SplitFacts
from undercurrent.evaluation.inputs import UNKNOWN, Values, aligned, known, labels_of
from undercurrent.evaluation.metrics import Bools
from undercurrent.evaluation.options import Options
from undercurrent.evaluation.splits import UNUSED, Parts, Split, StoredSplit, part_by_time, settle

FITTING_SHARES = (0.4, 0.2, 0.4)
JUDGING_SHARES = (0.0, 0.4, 0.6)
"""Where nothing is to be fitted."""


def parted(
    table: pd.DataFrame,
    split: Values | Path | None,
    selected: Bools,
    options: Options,
    *,
    fits: bool,
    test_reads: int | None = None,
) -> tuple[pd.DataFrame, SplitFacts, Ints]:
    """Return the table with its column `part`, the facts of the split, and the code of what is never parted, [n].

    Args:
        table: the requests.
        split: as `evaluate` takes it.
        selected: True for the requests whose label is of no use in a figure, [n]; what is fitted may use it.
        options: of the evaluation.
        fits: whether something (a baseline, a control) is to be fitted.
        test_reads: how often a given test part was read, if whoever gives it counts.

    Raises:
        EvaluationError: the split does not fit the requests.
    """
    ids, groups = table["request_id"].tolist(), table["group"].tolist()
    shares = options.shares or (FITTING_SHARES if fits else JUDGING_SHARES)
    rule, hashes = SplitRule(shares=shares, salt=str(options.seed)), [group_hash(group) for group in groups]
    stored: StoredSplit | None = None
    if isinstance(split, Path):
        stored = StoredSplit.load(split) if split.exists() else StoredSplit(rule)
        source, parts = "stored", stored.place(hashes)
    elif split is not None:
        source, parts = "given", np.array([str(part) for part in aligned("split", split, ids)])
    else:
        source, parts = "by group hash", StoredSplit(rule).place(hashes)
    if options.test_after is not None:
        parts = _by_time(table, parts, options.test_after)
    texts = table["prompt"].tolist() if "prompt" in table else table["text"].tolist() if "text" in table else None
    settled = settle(parts, groups, texts, move=options.move_duplicates)
    if stored is not None and isinstance(split, Path):
        used = settled.parts != UNUSED
        stored.keep([group for group, kept in zip(hashes, used, strict=True) if kept], settled.parts[used])
        stored.test_reads += 1
        stored.save(split)
    label = np.where(selected & (settled.parts != "fit"), UNKNOWN, table["label"])
    table = table.assign(part=settled.parts, label=label)
    reads = test_reads if stored is None else stored.test_reads
    return table, _facts(source, table, settled, texts is not None, reads), settled.units


def _by_time(table: pd.DataFrame, parts: Parts, test_after: float) -> Parts:
    if "time" not in table:
        raise EvaluationError("test_after needs the column time, in seconds")
    return part_by_time(parts, table["group"].tolist(), table["time"].to_numpy(np.float64), test_after)


def _facts(source: str, table: pd.DataFrame, split: Split, texts_compared: bool, test_reads: int | None) -> SplitFacts:
    names = [*PARTS, *([UNUSED] if (split.parts == UNUSED).any() else [])]
    return SplitFacts(
        source=source,
        parts=tuple(_counts(name, table) for name in names),
        texts_compared=texts_compared,
        exact_across=split.exact_across,
        near_across=split.near_across,
        groups_across=split.groups_across,
        moved=split.moved,
        left_across=split.left_across,
        common_passages=split.common_passages,
        largest_unit=split.largest_unit,
        test_reads=test_reads,
    )


def _counts(name: str, table: pd.DataFrame) -> PartCounts:
    part = table[table["part"] == name]
    chosen = part[known(part)]
    positives = int(labels_of(chosen).sum())
    weights = 1 / chosen["sampling_probability"].to_numpy(np.float64) if "sampling_probability" in chosen else None
    return PartCounts(
        part=name,
        requests=len(chosen),
        groups=int(chosen["group"].nunique()),
        positives=positives,
        negatives=len(chosen) - positives,
        unknown=len(part) - len(chosen),
        unscored=int(chosen["score"].isna().sum()),
        effective_n=float(len(chosen)) if weights is None else kish(weights),
    )
