"""Groups never straddle, duplicates are moved, and a stored split stays what it was."""

from pathlib import Path

import numpy as np
import pytest

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.dataset_split import SplitRule, group_hash
from undercurrent.evaluation.splits import StoredSplit, part_by_time, settle


def test_parts_are_a_function_of_the_group_and_come_in_their_shares() -> None:
    stored = StoredSplit(SplitRule(shares=(0.5, 0.2, 0.3)))
    groups = [group_hash(f"user-{number}") for number in range(20_000)]
    parts = stored.place(groups)
    assert (stored.place(groups[::-1])[::-1] == parts).all()
    for name, wanted in (("fit", 0.5), ("threshold", 0.2), ("test", 0.3)):
        assert (parts == name).mean() == pytest.approx(wanted, abs=0.02)
    assert (StoredSplit(SplitRule(shares=(0.5, 0.2, 0.3), salt="1")).place(groups) != parts).any()


def test_a_dataset_and_a_stored_split_place_a_group_alike() -> None:
    rule = SplitRule(shares=(0.5, 0.2, 0.3))
    groups = [group_hash(f"user-{number}") for number in range(200)]
    assert StoredSplit(rule).place(groups).tolist() == [rule.part_of(group) for group in groups]


def test_no_fit_share_leaves_nothing_in_fit() -> None:
    parts = StoredSplit(SplitRule(shares=(0.0, 0.4, 0.6))).place([group_hash(str(number)) for number in range(2000)])
    assert set(parts.tolist()) == {"threshold", "test"}


def test_a_duplicate_in_test_is_moved_to_fit_and_counted() -> None:
    parts = np.array(["fit", "test", "test", "threshold"])
    split = settle(parts, ["a", "b", "c", "d"], ["same text", "Same text!", "other", "another"])
    assert split.parts.tolist() == ["fit", "fit", "test", "threshold"]
    assert (split.exact_across, split.moved, split.left_across, split.groups_across) == (2, 1, 0, 0)


def test_a_group_that_straddles_takes_its_duplicates_along() -> None:
    parts = np.array(["fit", "test", "test", "test"])
    split = settle(parts, ["a", "a", "b", "c"], ["one", "two", "two", "three"])
    assert split.parts.tolist() == ["fit", "fit", "fit", "test"]
    assert split.groups_across == 1
    assert split.largest_unit == 3


def test_what_is_left_where_it_was_is_counted() -> None:
    parts = np.array(["fit", "test", "test"])
    split = settle(parts, ["a", "a", "b"], None, move=False)
    assert split.parts.tolist() == parts.tolist()
    assert (split.moved, split.left_across) == (0, 2)


def test_an_unknown_part_is_refused_by_name() -> None:
    with pytest.raises(EvaluationError, match="'train'; it must be one of fit, threshold, test"):
        settle(np.array(["train"]), ["a"], None)


def test_by_time_a_group_that_goes_on_is_in_no_earlier_part() -> None:
    placed = np.array(["fit", "fit", "test", "threshold"])
    parts = part_by_time(placed, ["a", "a", "b", "c"], np.array([1.0, 9.0, 2.0, 3.0]), 5.0)
    assert parts.tolist() == ["unused", "test", "fit", "threshold"]
    with pytest.raises(EvaluationError, match="row 1 has none"):
        part_by_time(placed, ["a", "a", "b", "c"], np.array([1.0, np.nan, 2.0, 3.0]), 5.0)


def test_a_stored_split_keeps_parts_by_hash_and_places_new_groups(tmp_path: Path) -> None:
    stored = StoredSplit(SplitRule(shares=(0.0, 0.0, 1.0)))
    stored.keep([group_hash("alice")], np.array(["fit"]))
    stored.test_reads = 2
    stored.save(tmp_path / "split.json")
    assert "alice" not in (tmp_path / "split.json").read_text()
    again = StoredSplit.load(tmp_path / "split.json")
    assert again == stored
    assert again.place([group_hash("alice"), group_hash("bob")]).tolist() == ["fit", "test"]


@pytest.mark.parametrize("text", ["{}", "no json", '{"shares": [1], "salt": "", "parts": {}, "test_reads": 0}'])
def test_a_file_that_is_no_split_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "split.json").write_text(text)
    with pytest.raises(EvaluationError, match=r"split\.json is no stored split"):
        StoredSplit.load(tmp_path / "split.json")
