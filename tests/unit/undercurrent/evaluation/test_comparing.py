"""Two probes are compared on the same requests, and told apart only where they differ."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from undercurrent.errors import EvaluationError
from undercurrent.evaluation import Options, Report, compare, evaluate
from undercurrent.evaluation.resampling import Bootstrap

BOOTSTRAP = Bootstrap(rounds=300)


def _report(shift: float, *, seed: int = 0, name: str = "probe", threshold: float | None = 1.0, groups=None) -> Report:
    labels = np.arange(2000) % 2 == 0
    common = np.random.default_rng(7).normal(size=2000)
    scores = 0.8 * common + 0.6 * np.random.default_rng(seed).normal(size=2000) + shift * labels
    options = Options(name=name, threshold=threshold, fpr_targets=(), rounds=100)
    return evaluate(scores, labels, groups=groups, options=options)


def test_a_better_probe_is_found_better_in_rank_and_rate() -> None:
    found = compare(_report(2.0, name="new"), _report(1.0, seed=1, name="old"), bootstrap=BOOTSTRAP)
    assert found.auroc.low > 0.1
    assert found.tpr.low > 0.1
    assert found.fpr.low <= 0 <= found.fpr.high
    assert found.positives.p < 1e-6
    assert found.positives.only_first > found.positives.only_second
    assert len(found.disagreements) == sum(
        (
            found.positives.only_first,
            found.positives.only_second,
            found.negatives.only_first,
            found.negatives.only_second,
        )
    )
    assert not found.grouped
    assert "new minus old" in found._repr_html_()


def test_equal_probes_are_told_apart_no_more_often_than_by_chance() -> None:
    wrong = 0
    for seed in range(0, 40, 2):
        found = compare(_report(1.0, seed=seed), _report(1.0, seed=seed + 1), bootstrap=BOOTSTRAP)
        wrong += not found.auroc.low <= 0 <= found.auroc.high
    assert wrong <= 4


def test_a_probe_and_itself_differ_in_nothing() -> None:
    report = _report(1.0)
    found = compare(report, report, bootstrap=BOOTSTRAP)
    assert (found.auroc.value, found.auroc.low, found.auroc.high) == (0.0, 0.0, 0.0)
    assert found.positives.p is None
    assert found.disagreements == ()
    assert (found.tpr.value, found.tpr.low) == (0.0, None)


def test_reports_are_read_from_their_folders_and_the_comparison_is_json(tmp_path: Path) -> None:
    _report(2.0, name="new").write(tmp_path / "new")
    _report(1.0, seed=1, name="old").write(tmp_path / "old")
    found = compare(tmp_path / "new", tmp_path / "old", bootstrap=BOOTSTRAP)
    assert found == compare(_report(2.0, name="new"), _report(1.0, seed=1, name="old"), bootstrap=BOOTSTRAP)
    assert json.loads(found.to_json())["n"] == found.n
    with pytest.raises(EvaluationError, match=r"holds no report\.json"):
        compare(tmp_path, tmp_path / "old")


def test_a_probe_without_a_threshold_is_compared_in_rank_alone() -> None:
    found = compare(_report(2.0, threshold=None, name="new"), _report(1.0), bootstrap=BOOTSTRAP)
    assert str(found.tpr) == "n/a (needs a threshold of new)"
    assert found.positives is None
    assert found.auroc.value > 0


def test_groups_are_resampled_whole_and_said_to_be_there() -> None:
    groups = np.arange(2000) // 20
    found = compare(_report(2.0, groups=groups), _report(1.0, seed=1, groups=groups), bootstrap=BOOTSTRAP)
    assert found.grouped


def test_reports_of_other_requests_or_labels_are_not_compared() -> None:
    one = _report(1.0)
    renamed = one.table.assign(request_id="x" + one.table["request_id"])
    with pytest.raises(EvaluationError, match="share no request"):
        compare(one, Report(one.findings, renamed))
    turned = one.table.assign(label=np.where(one.table["label"] == "positive", "negative", "positive"))
    with pytest.raises(EvaluationError, match="in one report and"):
        compare(one, Report(one.findings, turned))
    part = pd.concat([one.table.head(1000), renamed.tail(1000)])
    assert compare(one, Report(one.findings, part), bootstrap=BOOTSTRAP).left_out > 0
