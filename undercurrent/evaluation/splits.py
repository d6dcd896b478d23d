"""The split into fit, threshold and test: by group, for good, with what its parts share moved to one side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import ConfigError, EvaluationError
from undercurrent.evaluation.dataset_split import PARTS, SplitRule
from undercurrent.evaluation.duplicates import Duplicates, find_duplicates, join
from undercurrent.evaluation.figures import Ints
from undercurrent.evaluation.metrics import Floats
from undercurrent.files import write_text

UNUSED = "unused"
"""Part of the earlier requests of a group that goes on after `test_after`."""

Parts = NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class Split:
    """Which part each request belongs to.

    Args:
        parts: `fit`, `threshold`, `test` or `unused`, [n].
        units: code of what is never parted: the requests of a group, and those that share text with them, [n].
        same: which of them share text.
        exact_across: requests whose text stood in two parts.
        near_across: requests that shared 13 words in a row with one of another part; exact ones among them.
        groups_across: groups that stood in two parts.
        moved: requests moved to the other side for one of these.
        left_across: requests of units that still stand in two parts.
        common_passages: passages that so many requests share that they were taken for a template's.
        largest_unit: requests of the largest unit.
    """

    parts: Parts
    units: Ints
    same: Duplicates
    exact_across: int
    near_across: int
    groups_across: int
    moved: int
    left_across: int
    common_passages: int
    largest_unit: int


@dataclass(slots=True)
class StoredSplit:
    """A split as it is kept, so that the next probe is judged on the same test part: by hash of group.

    Args:
        rule: where groups go that come later.
        parts: part of each known group, by `group_hash`.
        test_reads: how often figures of the test part were made.
    """

    rule: SplitRule
    parts: dict[str, str] = field(default_factory=dict)
    test_reads: int = 0

    @classmethod
    def load(cls, path: Path) -> StoredSplit:
        """Read a stored split.

        Raises:
            EvaluationError: the file is no stored split.
        """
        try:
            found: Mapping[str, Any] = json.loads(path.read_text())
            fit, threshold, test = (float(share) for share in found["shares"])
            rule = SplitRule(shares=(fit, threshold, test), salt=str(found["salt"]))
            stored = cls(rule, dict(found["parts"]), int(found["test_reads"]))
        except (OSError, KeyError, TypeError, ValueError, ConfigError) as wrong:
            raise EvaluationError(f"{path} is no stored split: {wrong}") from wrong
        strange = next((part for part in stored.parts.values() if part not in (*PARTS, UNUSED)), None)
        if strange is not None:
            raise EvaluationError(f"{path} knows a part {strange!r}; parts are {', '.join(PARTS)}")
        return stored

    def save(self, path: Path) -> None:
        """Write the split; a reader sees the old file or the new one.

        Raises:
            EvaluationError: it cannot be written there.
        """
        told = {"format": 1, "shares": self.rule.shares, "salt": self.rule.salt, "test_reads": self.test_reads}
        try:
            write_text(path, json.dumps({**told, "parts": self.parts}, indent=1, sort_keys=True) + "\n")
        except OSError as exc:
            raise EvaluationError(f"{path}: the split cannot be kept there: {exc.strerror}") from exc

    def place(self, hashes: Sequence[str]) -> Parts:
        """Return the part of each request [n] by its group's hash: as stored, or for a new group by the rule."""
        by_group = {group: self.parts.get(group) or self.rule.part_of(group) for group in set(hashes)}
        return np.array([by_group[group] for group in hashes])

    def keep(self, hashes: Sequence[str], parts: Parts) -> None:
        """Store where groups stand, by their hashes."""
        self.parts.update({group: str(part) for group, part in zip(hashes, parts, strict=True)})


def part_by_time(placed: Parts, groups: Sequence[str], times: Floats, test_after: float) -> Parts:
    """Return parts with everything from an instant on in test and everything before it out of it.

    The earlier requests of a group that goes on afterwards are used nowhere. An earlier request that was placed in test
    is a fit request.

    Raises:
        EvaluationError: a time is missing.
    """
    missing = np.flatnonzero(~np.isfinite(times))
    if missing.size:
        raise EvaluationError(f"test_after needs the time of every request; row {missing[0]} has none")
    late = times >= test_after
    goes_on = np.isin(groups, np.unique(np.asarray(groups)[late]))
    early = np.where(placed == "test", "fit", placed)
    return np.where(late, "test", np.where(goes_on, UNUSED, early))


def settle(
    parts: Parts,
    groups: Sequence[str],
    texts: Iterable[str | None] | None,
    *,
    move: bool = True,
    folder: Path | None = None,
) -> Split:
    """Return a split with what straddled counted and, if so wished, moved to the earliest part that it touches.

    The earliest, since that costs test requests and never the test's honesty.

    Args:
        parts: of the requests, [n].
        groups: theirs, [n].
        texts: theirs, read once; None where there are none.
        move: otherwise what straddles is counted alone.
        folder: where passages of texts lie that do not fit memory.

    Raises:
        EvaluationError: a part has another name.
    """
    strange = sorted(set(parts.tolist()) - {*PARTS, UNUSED})
    if strange:
        raise EvaluationError(f"a request's part is {strange[0]!r}; it must be one of {', '.join(PARTS)}")
    group_codes = np.unique(np.asarray(groups), return_inverse=True)[1]
    n = len(parts)
    same = find_duplicates(texts if texts is not None else [None] * n, folder)
    rows = np.arange(n)
    units = join(np.stack([np.append(rows, rows), np.append(group_codes + n, same.near + 2 * n)]), 3 * n)[:n]
    units = np.unique(units, return_inverse=True)[1]
    settled = _earliest(parts, units) if move else parts
    return Split(
        parts=settled,
        units=units,
        same=same,
        exact_across=int(across(same.exact, parts).sum()),
        near_across=int(across(same.near, parts).sum()),
        groups_across=int(np.unique(group_codes[across(group_codes, parts)]).size),
        moved=int((settled != parts).sum()),
        left_across=int(across(units, settled).sum()),
        common_passages=same.common_passages,
        largest_unit=int(np.bincount(units).max()),
    )


def across(codes: Ints, parts: Parts) -> NDArray[np.bool_]:
    """Return True for each request [n] whose code stands in more than one part; what is unused is in none."""
    used = parts != UNUSED
    pairs = np.unique(np.stack([codes[used], _rank(parts[used])]), axis=1)
    found, counts = np.unique(pairs[0], return_counts=True)
    return np.asarray(np.isin(codes, found[counts > 1]) & used)


def _rank(parts: Parts) -> Ints:
    return np.array([(*PARTS, UNUSED).index(part) for part in parts], dtype=np.int64)


def _earliest(parts: Parts, units: Ints) -> Parts:
    used = parts != UNUSED
    earliest = np.full(units.max() + 1, len(PARTS))
    np.minimum.at(earliest, units[used], _rank(parts[used]))
    return np.where(used, np.array([*PARTS, UNUSED])[earliest[units]], parts)
