"""Where texts are cut for the baselines."""

from __future__ import annotations

import numpy as np

from undercurrent.evaluation.dataset_scores import Pass, cut_alike


def passed(stop_at, length=40):
    """Texts of one character a token, cut where the probe acted, whole where it did not."""
    found = Pass()
    for name, tokens in stop_at.items():
        found.stop_at[name] = tokens
        whole = "x" * length
        found.texts[name] = whole if np.isnan(tokens) else whole[: int(tokens)]
        if np.isnan(tokens):
            found.ends[name] = np.arange(1, length + 1, dtype=np.int32)
    return found


def test_length_tells_nothing_of_whether_the_probe_acted():
    rng = np.random.default_rng(0)
    stop_at = {f"p{n}": float(rng.integers(0, 12)) for n in range(400)} | {f"n{n}": np.nan for n in range(400)}
    found = passed(stop_at)
    cut_alike(found)
    acted, others = (np.array([len(found.texts[f"{kind}{n}"]) for n in range(400)]) for kind in "pn")
    assert abs(acted.mean() - others.mean()) < 0.5
    assert set(others) == set(acted)
    again = passed(stop_at)
    cut_alike(again)
    assert again.texts == found.texts


def test_a_text_that_is_shorter_stays_whole_and_without_an_act_all_do():
    found = passed({"p": 30.0, "n": np.nan})
    found.texts["n"], found.ends["n"] = "abc", np.array([1, 2, 3], np.int32)
    cut_alike(found)
    assert found.texts["n"] == "abc"
    alone = passed({"n": np.nan})
    cut_alike(alone)
    assert len(alone.texts["n"]) == 40
