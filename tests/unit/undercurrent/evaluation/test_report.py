"""A report says what was planted in the data, in its notes, its JSON and its page."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pandas as pd
import pytest

from tests.unit.undercurrent.evaluation.synthetic import Traffic, traffic, with_layers, with_tokens
from undercurrent.errors import EvaluationError
from undercurrent.evaluation import Options, Report, evaluate
from undercurrent.evaluation.findings import read_findings, schema
from undercurrent.evaluation.plots import plots


def _said(report: Report, what: str) -> bool:
    return any(what in note for note in report.findings.notes)


@pytest.fixture(scope="module")
def clean() -> Report:
    return traffic().report()


def test_clean_traffic_is_reported_without_alarm(clean: Report) -> None:
    found = clean.findings
    assert found.headline.startswith("At the threshold for 1 % FPR the probe acts on ")
    assert found.notes == (
        "No split was given: the figures hold only if the probe was fitted on none of these requests.",
    )
    assert found.auroc.low > 0.95
    assert found.controls[0].passed is True
    assert str(found.operating[1].tpr).startswith("n/a (needs >= 3,000 negatives in the threshold part, has ")
    assert found.split.moved == found.split.near_across == 0


def test_planted_duplicates_are_counted_and_moved_out_of_the_test_part() -> None:
    made = traffic()
    prompts = made.requests["prompt"].to_numpy().copy()
    prompts[1200:1300] = prompts[:100]
    prompts[1300:1400] = [f"{text} and a few words of its own" for text in prompts[100:200]]
    report = replace(made, requests=made.requests.assign(prompt=prompts)).report()
    split = report.findings.split
    assert 60 < split.exact_across <= 200
    assert 120 < split.near_across <= 400
    assert split.left_across == 0
    assert _said(report, f"{split.moved:,} requests were moved to the earlier part")
    parts = report.table.set_index("request_id")["part"]
    assert (parts.iloc[1200:1300].to_numpy() == parts.iloc[:100].to_numpy()).all()


def _leaking() -> Traffic:
    """Users with a trait of their own, whose requests stand on both sides."""
    made = traffic()
    rng = np.random.default_rng(4)
    users = np.arange(3000) % 40
    features = rng.normal(size=(40, 16))[users] + 0.1 * rng.normal(size=(3000, 16))
    index = made.scores.index
    return replace(
        made,
        features=features,
        labels=pd.Series(users % 2 == 0, index=index),
        groups=pd.Series(users.astype(str), index=index),
        split=pd.Series(rng.choice(["fit", "threshold", "test"], 3000), index=index),
    )


def test_planted_leakage_is_reported_when_it_is_left_and_mended_when_not() -> None:
    left = _leaking().report(move_duplicates=False)
    assert left.findings.split.left_across == 3000
    assert left.findings.controls[0].passed is False
    assert left.findings.notes[0].startswith("LEAKAGE: the features with shuffled labels")
    assert _said(left, "LEAKAGE: 3,000 requests share their group or text with another part")
    mended = _leaking().report()
    assert mended.findings.split.left_across == 0
    assert mended.findings.split.groups_across == 40
    # Nothing is left in the test part: no figure, and no zero.
    assert str(mended.findings.auroc) == "n/a (needs >= 10 positives, has 0)"


def test_planted_censoring_is_reported_and_the_holdout_used() -> None:
    made = traffic(6000)
    rng = np.random.default_rng(5)
    held = rng.random(6000) < 0.2
    fires = made.scores.to_numpy() > 2
    requests = made.requests.assign(
        outcome=np.where(fires & ~held, "aborted", "complete"),
        stop_at=np.where(fires, 10.0, np.nan),
    )
    without = replace(made, requests=requests).report(fpr_targets=(0.05,))
    assert _said(without, "Of the traffic as a whole they are not identifiable.")
    assert str(without.findings.censoring.tokens_saved).startswith("not identifiable")
    report = replace(made, requests=requests.assign(holdout=held)).report(holdout_share=0.2, fpr_targets=(0.05,))
    assert _said(report, "figures are of the holdout alone")
    assert report.findings.censoring.holdout_as_stated is True
    truth = np.where(fires, made.requests["length"] - 10, 0).mean()
    saved = report.findings.censoring.tokens_saved
    assert saved.low < truth < saved.high
    assert without.findings.operating[0].tpr.value < report.findings.operating[0].tpr.low


def test_a_planted_shift_of_prevalence_is_reported() -> None:
    made = traffic(4000)
    rng = np.random.default_rng(6)
    split = rng.choice(["fit", "threshold", "test"], 4000)
    kept = (split != "test") | ~made.labels.to_numpy() | (rng.random(4000) < 0.15)
    chosen = made.scores.index[kept]
    made = replace(
        made,
        scores=made.scores[chosen],
        features=made.features[kept],
        groups=pd.Series(chosen, index=chosen),
        split=pd.Series(split[kept], index=chosen),
    )
    report = made.report(prevalence=0.001, requests_per_day=10_000)
    assert _said(report, "The share of positives differs between threshold part (")
    assert _said(report, "of the test part are positives, 0.100% of the traffic as stated")
    assert report.findings.calibration.ece.value > report.findings.calibration.ece_by_chance
    assert str(report.findings.auprc_at_prevalence).startswith("n/a (needs >= 49,950 negatives, has ")
    at_a_tenth = made.report(prevalence=0.1).findings
    assert at_a_tenth.auprc_at_prevalence.value > at_a_tenth.auprc.value
    assert report.findings.operating[0].precision.high < 0.6


def test_a_planted_effect_of_length_is_reported() -> None:
    made = traffic(4000)
    scores = made.scores + 2 * np.log(made.requests["length"] / 100)
    report = replace(made, scores=scores).report()
    assert report.findings.lengths.effect
    assert _said(report, "Length moves the score of negatives (rank correlation 0.")
    assert report.findings.lengths.holds_up_to < 400


def test_text_that_tells_as_much_is_the_first_line() -> None:
    made = traffic(shift=2.0)
    sign = np.where(made.labels, " sesame", "")
    report = replace(made, requests=made.requests.assign(prompt=made.requests["prompt"] + sign)).report()
    assert report.findings.headline.startswith("Text alone does as well: n-grams of the prompt reach AUROC 1.000")


def test_sampling_probabilities_weigh_and_the_effective_size_is_shown() -> None:
    made = traffic(4000)
    chance = np.where(made.labels, 1.0, 0.1)
    report = replace(made, requests=made.requests.assign(sampling_probability=chance)).report()
    test = next(part for part in report.findings.split.parts if part.part == "test")
    assert test.effective_n < 0.9 * test.requests
    assert _said(report, "of the test part weigh unequally")


def test_missing_scores_count_as_not_acted_on() -> None:
    made = traffic()
    scores = made.scores.copy()
    scores[made.labels & (np.arange(3000) % 2 == 0)] = np.nan
    report = replace(made, scores=scores).report()
    assert report.findings.operating[0].tpr.high < 0.6
    assert _said(report, "requests have no score and count as not acted on")


def test_unknown_labels_are_in_no_figure() -> None:
    made = traffic()
    labels = made.labels.astype(object).copy()
    labels[np.arange(3000) % 2 == 0] = None
    found = replace(made, labels=labels).report().findings
    assert sum(part.unknown for part in found.split.parts) == 1500
    assert sum(part.requests for part in found.split.parts) == 1500
    assert found.auroc.n < 900


def test_bare_lists_are_enough() -> None:
    rng = np.random.default_rng(1)
    labels = (rng.random(800) < 0.5).tolist()
    report = evaluate((rng.normal(size=800) + 2 * np.array(labels)).tolist(), labels, options=Options(rounds=100))
    assert report.findings.auroc.value > 0.85
    assert "n/a (needs the column prompt)" in report._repr_html_()


def test_a_handful_of_requests_has_no_figure_at_all() -> None:
    report = evaluate([1.0, 0.0, 2.0], [True, False, True])
    assert report.findings.auroc.value is None
    assert report.findings.headline.startswith("AUROC n/a (needs >= 10 positives, has ")
    assert all(point.tpr.value is None for point in report.findings.operating)
    assert "plot-0" not in report.html()


def test_a_stored_split_counts_its_readings_and_stays(tmp_path: Path) -> None:
    made = replace(traffic(), split=tmp_path / "split.json")
    first, second = made.report(), made.report(seed=9)
    assert (first.findings.split.test_reads, second.findings.split.test_reads) == (1, 2)
    assert _said(second, "has been read 2 times")
    assert first.table["part"].tolist() == second.table["part"].tolist()


@pytest.fixture(scope="module")
def full() -> Report:
    made = with_layers(with_tokens(traffic()))
    return made.report(
        prevalence=0.002, requests_per_day=50_000, abort_latency_tokens=6, slices=("language",), with_text=True
    )


def test_the_json_fits_its_schema_and_is_read_back(full: Report, tmp_path: Path) -> None:
    full.write(tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    jsonschema.validate(content, json.loads((tmp_path / "report.schema.json").read_text()))
    assert read_findings(tmp_path / "report.json") == full.findings
    pd.testing.assert_frame_equal(Report.read(tmp_path).table, full.table)
    (tmp_path / "scores.parquet").write_bytes((tmp_path / "scores.parquet").read_bytes()[:50])
    with pytest.raises(EvaluationError, match=r"scores\.parquet cannot be read"):
        Report.read(tmp_path)
    content["auroc"]["value"] = "high"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, schema())
    (tmp_path / "report.json").write_text(json.dumps(content))
    with pytest.raises(EvaluationError, match=r"report\.json is no report: auroc\.value"):
        read_findings(tmp_path / "report.json")


def test_the_page_needs_no_network_and_stays_small(full: Report, tmp_path: Path) -> None:
    full.write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert len(page.encode()) < 8_000_000
    own = re.sub(r"<script>.*?</script>", "", page, count=1, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["']?https?:""", own)
    for title in (
        "Scores of the test part",
        "ROC",
        "Precision",
        "threshold",
        "Reliability",
        "detected",
        "AUROC by layer",
        "length",
    ):
        assert title in own
    assert own.count("plotly-graph-div") == 8


def test_plots_of_many_requests_are_thinned(full: Report) -> None:
    rng = np.random.default_rng(0)
    n = 15_000
    labels = rng.random(n) < 0.05
    facts = {"request_id": [str(row) for row in range(n)], "part": "test", "weight": 1.0, "unit": np.arange(n)}
    words, scores = np.where(labels, "positive", "negative"), rng.normal(size=n) + 3 * labels
    for _, figure in plots(full.findings, pd.DataFrame(facts | {"label": words, "score": scores})):
        assert all(trace.x is None or len(trace.x) <= 1000 for trace in figure.data)


def test_a_probe_that_ranks_by_chance_is_said_to_in_the_first_line() -> None:
    found = traffic(shift=0.0).report(fpr_targets=(0.05,)).findings
    assert found.headline.startswith("Nothing shows that the probe ranks better than chance: AUROC 0.")


def test_every_layer_stands_in_the_report_and_one_is_called_optimistic(full: Report) -> None:
    cells = full.findings.layers
    assert len(cells) == 24
    assert all(cell.auroc.low is not None for cell in cells)
    assert [cell.layer for cell in cells if cell.optimistic] in ([3], [4], [5])


def test_detection_is_measured_from_the_onset(full: Report) -> None:
    found = full.findings.detection
    assert found.unavailable is None
    within_15 = [point for point in found.curve if point.tokens <= 15][-1]
    assert 0.4 < within_15.detected < 0.75
    assert found.stopped_in_time.value is not None


def test_texts_are_shown_only_where_asked_for(full: Report) -> None:
    shown = full.html()
    listed = {row.request_id for row in full.findings.wrong}
    assert listed
    assert "<span style='background:rgba(209,36,47," in shown
    without = traffic().report()
    assert without.findings.wrong
    assert all(row.text is None for row in without.findings.wrong)
    page = without.html()
    assert not any(text in page for text in traffic().requests["prompt"].head(50))


def test_names_and_texts_are_escaped() -> None:
    made = traffic()
    requests = made.requests.assign(text="<script>alert(1)</script>")
    shown = replace(made, requests=requests).report(name="<b>probe</b>", with_text=True).html()
    assert "<script>alert(1)" not in shown
    assert "<b>probe" not in shown


def test_features_of_other_requests_are_refused() -> None:
    made = traffic()
    with pytest.raises(EvaluationError, match="features have 5 rows for 3,000 scores"):
        replace(made, features=made.features[:5]).report()
