"""The split of an export: by group, with requests that share text with one of another part moved to one side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from undercurrent.evaluation.dataset_facts import FactStore, Place
from undercurrent.evaluation.dataset_split import SplitRule
from undercurrent.evaluation.splits import across, settle


def place(facts: FactStore, rule: SplitRule, folder: Path, *, move: bool) -> None:
    """Decide the part of every prompt that is known.

    The prompts of the whole topic decide, not those of the range: two exports of different ranges agree.

    Args:
        facts: the prompts; where they stand is added.
        rule: how groups are drawn.
        folder: where passages lie that do not fit memory.
        move: bring requests that share text to the earliest part that one of them was drawn for; the earliest, since
            that costs test requests and never the test's honesty.
    """
    groups = facts.groups()
    if not groups:
        return
    names = [name for name, _ in groups]
    drawn = np.array([rule.part_of(name, latest_us) for name, latest_us in groups])
    split = settle(drawn, names, facts.texts(), move=move, folder=folder)
    rows = zip(drawn.tolist(), split.parts.tolist(), split.same.exact.tolist(), split.same.near.tolist(), strict=True)
    facts.add_places(Place(*row) for row in rows)
    facts.add_parts(dict(zip(names, split.parts.tolist(), strict=True)))


def duplicates(facts: FactStore, *, move: bool) -> dict[str, Any]:
    """Return what the manifest says of the exported requests that share text with one of another part.

    Args:
        facts: with every stream.
        move: whether `place` brought them to one side.
    """
    places = facts.places()
    counts = {"exact_across": 0, "near_across": 0, "moved": 0}
    if places:
        drawn = np.array([item.drawn for item in places])
        counts = {
            "exact_across": int(across(np.array([item.exact for item in places]), drawn).sum()),
            "near_across": int(across(np.array([item.near for item in places]), drawn).sum()),
            "moved": sum(item.drawn != item.part for item in places),
        }
    return {"rule": "13 words in a row of the prompt, without case and punctuation", "kept": not move, **counts}
