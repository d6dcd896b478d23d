"""`undercurrent probe evaluate | compare` on exported datasets: figures, what is counted and written, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pandas as pd
import pytest

from tests.unit.full_disk import full_disk
from tests.unit.undercurrent.cli.evaluation_doubles import (
    PROMPT,
    is_positive,
    write_dataset,
    write_probe,
    write_tokenizer,
)
from undercurrent import evaluation
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.evaluation.dataset_split import SplitRule
from undercurrent.evaluation.scoring import score_requests
from undercurrent.protocol.holdout import HoldoutRule

FEW = ("--rounds", "100")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dataset, one probe that reads the planted direction, one that reads a layer with nothing in it."""
    base = tmp_path_factory.mktemp("evaluation")
    write_dataset(base / "d", 300, rule=SplitRule(shares=(0.3, 0.2, 0.5), group_by="user"))
    write_probe(base / "guard")
    write_probe(base / "blind", layer=3)
    return base


def evaluate(probe: Path, dataset: Path, out: Path, *more: str) -> int:
    label = () if "--label" in more else ("--label", "bad")
    return run(app, PROG_NAME, ["probe", "evaluate", str(probe), str(dataset), "--out", str(out), *label, *FEW, *more])


def compare(*arguments: object) -> int:
    return run(app, PROG_NAME, ["probe", "compare", *map(str, arguments), *FEW])


def report_in(folder: Path) -> dict:
    content = json.loads((folder / "report.json").read_text())
    jsonschema.validate(content, json.loads((folder / "report.schema.json").read_text()))
    return content


def test_a_probe_is_judged_as_it_would_act_and_every_reading_is_counted(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = evaluation.load(folders / "d")
    before = len(data.manifest.get("test_reads", ()))
    more = ("--source", "ann", "--prevalence", "0.01", "--requests-per-day", "10000", "--slice", "language")
    assert evaluate(folders / "guard", folders / "d", tmp_path / "r", *more, "--fpr", "0.1") == 0
    told = capsys.readouterr().out
    found = report_in(tmp_path / "r")
    assert f"{found['headline'][:60]}" in told.replace("│", "").replace("\n", " ")
    assert "report.html" in told

    table = pd.read_parquet(tmp_path / "r" / "scores.parquet").set_index("request_id")
    alone = score_requests(folders / "guard", data.blocks("residual", layers=(5,)))
    assert table["score"].to_dict() == alone["score"].to_dict()
    parts = data.requests.set_index("request_id")["split"]
    assert (table["part"] == parts.reindex(table.index)).all()
    tested = table[table["part"] == "test"]
    truth = np.array([is_positive(int(name[1:])) for name in tested.index])
    known = (tested["label"] != "unknown").to_numpy()
    assert ((tested["label"] == "positive").to_numpy() == truth)[known].all()

    deployed = found["operating"][0]
    acted = (tested["score"] >= 3.0).to_numpy()
    assert deployed["threshold"] == 3.0
    assert deployed["tpr"]["value"] == pytest.approx(acted[known & truth].mean())
    assert deployed["fpr"]["value"] == pytest.approx(acted[known & ~truth].mean())
    assert found["auroc"]["value"] > 0.9
    assert found["tokens"]["auroc"]["value"] > 0.9
    assert found["detection"]["n"] == int((known & truth).sum())
    assert {part["value"] for part in found["slices"]} == {"de", "en"}
    reads = evaluation.load(folders / "d").manifest["test_reads"]
    assert len(reads) == before + 1
    assert reads[-1]["reader"].startswith("evaluate guard 1 (")
    assert found["split"]["test_reads"] == before + 1


def test_the_figures_stand_in_the_probes_folder_with_when_and_of_what(folders: Path, tmp_path: Path) -> None:
    probe = write_probe(tmp_path / "p")
    (probe / "metrics.json").write_text(json.dumps({"format": "undercurrent.probe-metrics/1", "fit": {"requests": 9},
        "threshold": {"wanted_fpr": 0.2}, "choice": {"sites": [
            {"layer": layer, "tensor_type": "residual_stream", "auroc": area, "low": area - 0.1, "high": area + 0.05}
            for layer, area in ((3, 0.5), (5, 0.9))]}, "test": None}))  # fmt: skip
    (probe / "README.md").write_text("# p\n\nNo test split has judged it yet.\n\nMine.\n")
    assert evaluate(probe, folders / "d", tmp_path / "r") == 0
    metrics = json.loads((probe / "metrics.json").read_text())
    assert metrics["fit"] == {"requests": 9}
    entry = metrics["test"]
    assert entry["label"] == "bad"
    assert entry["dataset"]["path"] == str(folders / "d")
    assert entry["auroc"]["value"] == report_in(tmp_path / "r")["auroc"]["value"]
    assert entry["at"].startswith("20")
    card = (probe / "README.md").read_text()
    assert "No test split" not in card
    assert entry["headline"] in card
    assert card.endswith("Mine.\n")
    found = report_in(tmp_path / "r")
    assert [(cell["layer"], cell["optimistic"]) for cell in found["layers"]] == [(3, False), (5, True)]
    assert "20 % FPR" in [point["name"] for point in found["operating"]]
    assert evaluate(probe, folders / "d", tmp_path / "s", "--no-record") == 0
    assert json.loads((probe / "metrics.json").read_text()) == metrics


def test_sources_of_labels_are_compared_where_one_is_named(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(folders / "guard", folders / "d", tmp_path / "r", "--source", "ann", "--no-record") == 0
    agreed = report_in(tmp_path / "r")["agreement"]
    assert [row["source"] for row in agreed] == ["judge"]
    assert agreed[0]["differ"] == 1
    assert agreed[0]["n"] == 54
    capsys.readouterr()
    assert evaluate(folders / "guard", folders / "d", tmp_path / "s", "--no-record") == 0
    assert "labels are of ann, judge together; --source NAME takes one" in capsys.readouterr().out
    unknown = {part["part"]: part["unknown"] for part in report_in(tmp_path / "s")["split"]["parts"]}
    assert sum(unknown.values()) == 31


def test_texts_are_shown_only_where_asked_for(folders: Path, tmp_path: Path) -> None:
    texts = evaluation.load(folders / "d").requests.set_index("request_id")["text"]
    assert evaluate(folders / "blind", folders / "d", tmp_path / "r", "--no-record", "--no-baselines") == 0
    page = (tmp_path / "r" / "report.html").read_text()
    assert report_in(tmp_path / "r")["wrong"]
    assert not any(text in page for text in texts)


def test_without_token_ids_no_text_is_cut_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = SplitRule(shares=(0.3, 0.2, 0.5), group_by="user")
    write_dataset(tmp_path / "d", 120, rule=rule, token_ids=False)
    assert run(app, PROG_NAME, ["dataset", "info", str(tmp_path / "d")]) == 0
    assert "residual: no token ids were recorded of 1,440 positions (token_ids: false)" in capsys.readouterr().out
    probe, tokenizer = write_probe(tmp_path / "guard"), write_tokenizer(tmp_path / "tokenizer.json")
    more = ("--source", "ann", "--tokenizer", str(tokenizer), "--with-text")
    assert evaluate(probe, tmp_path / "d", tmp_path / "r", *more) == 0
    told = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "records of 120 requests carry no token ids (token_ids: false)" in told


def test_a_tokenizer_cuts_texts_at_the_decision_and_shows_what_each_token_scored(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = evaluation.load(folders / "d")
    texts = data.requests.set_index("request_id")["text"]
    more = ("--source", "ann", "--no-record", "--with-text", "--no-baselines")
    hasty = write_probe(tmp_path / "hasty", threshold=0.5)
    assert evaluate(hasty, folders / "d", tmp_path / "r", *more) == 0
    whole = [row for row in report_in(tmp_path / "r")["wrong"] if row["kind"] == "false stop"]
    assert whole
    assert all(row["text"] == texts[row["request_id"]] for row in whole)
    capsys.readouterr()
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    assert evaluate(hasty, folders / "d", tmp_path / "s", *more, "--tokenizer", str(tokenizer)) == 0
    scores = score_requests(hasty, data.blocks("residual", layers=(5,)), keep_tokens=True)
    wrong = [row for row in report_in(tmp_path / "s")["wrong"] if row["kind"] == "false stop"]
    for row in wrong:
        decided = int(scores.loc[row["request_id"], "decided_at"])
        assert row["text"] == " ".join(texts[row["request_id"]].split()[: decided - PROMPT + 1])
    page = (tmp_path / "s" / "report.html").read_text()
    first = scores.loc[wrong[0]["request_id"]]
    word = texts[wrong[0]["request_id"]].split()[int(first["decided_at"]) - PROMPT]
    score = first["token_scores"][first["token_positions"].tolist().index(first["decided_at"])]
    assert re.search(rf"outline:2px solid var\(--mark\)' title='{score:.4g}'> ?{word}</span>", page)


def test_cut_requests_count_only_where_they_were_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "d", 200, rule=SplitRule(shares=(0.0, 0.2, 0.8)), aborted=150)
    probe = write_probe(tmp_path / "p")
    assert evaluate(probe, tmp_path / "d", tmp_path / "r", "--no-baselines", "--source", "ann") == 0
    found = report_in(tmp_path / "r")
    assert found["censoring"]["cut"]["aborted"] == 50
    assert found["settings"]["abort_latency_tokens"] == 2
    positives = next(part["positives"] for part in found["split"]["parts"] if part["part"] == "test")
    judged = ("--judged-by", "ann", "--no-baselines", "--source", "ann")
    assert evaluate(probe, tmp_path / "d", tmp_path / "s", *judged) == 0
    again = report_in(tmp_path / "s")
    assert again["censoring"]["cut"] == {"aborted": 5}  # nobody labelled them
    assert next(part["positives"] for part in again["split"]["parts"] if part["part"] == "test") > positives
    assert again["split"]["test_reads"] == 2
    assert "has been read 2 times" in capsys.readouterr().out


def test_a_recorded_holdout_is_used_without_being_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = HoldoutRule(share=0.4)
    shares = SplitRule(shares=(0.0, 0.2, 0.8))
    write_dataset(tmp_path / "d", 200, rule=shares, aborted=200, holdout=[rule])
    table = pd.read_parquet(tmp_path / "d" / "requests.parquet").set_index("request_id")
    assert table["holdout"].to_dict() == {name: rule.holds(name) for name in table.index}
    assert set(table["holdout_share"]) == {0.4}
    probe = write_probe(tmp_path / "p")
    quick = ("--no-baselines", "--no-record", "--source", "ann")

    assert evaluate(probe, tmp_path / "d", tmp_path / "recorded", *quick) == 0
    assert "figures are of the holdout alone" in " ".join(capsys.readouterr().out.split())
    found = report_in(tmp_path / "recorded")["censoring"]
    assert (found["holdout"], found["holdout_cut"]) == (int(table["holdout"].sum()), 0)
    assert found["holdout_as_stated"] is True
    assert found["aborted_outside"] == int((table["outcome"] == "aborted").sum())
    assert found["tokens_saved"]["value"] > 0

    assert evaluate(probe, tmp_path / "d", tmp_path / "stated", *quick, "--holdout-share", "0.4") == 0
    assert report_in(tmp_path / "stated")["censoring"] == found
    capsys.readouterr()
    assert evaluate(probe, tmp_path / "d", tmp_path / "none", *quick, "--holdout-share", "0") == 0
    assert "there is no holdout" in " ".join(capsys.readouterr().out.split())

    # What an earlier version exported does not have the columns.
    table.reset_index().drop(columns=["holdout", "holdout_share"]).to_parquet(tmp_path / "d" / "requests.parquet")
    manifest = json.loads((tmp_path / "d" / "manifest.json").read_text())
    del manifest["files"]["requests.parquet"]
    (tmp_path / "d" / "manifest.json").write_text(json.dumps(manifest))
    assert evaluate(probe, tmp_path / "d", tmp_path / "old", *quick) == 0
    old, without = (report_in(tmp_path / name)["censoring"] for name in ("old", "none"))
    assert old == without
    assert old["holdout"] == 0


def test_a_holdout_whose_share_changed_is_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = [HoldoutRule(), HoldoutRule(share=0.2), HoldoutRule(share=0.5)]
    write_dataset(tmp_path / "d", 150, rule=SplitRule(shares=(0.0, 0.2, 0.8)), holdout=rules)
    more = ("--no-baselines", "--no-record", "--source", "ann")
    assert evaluate(write_probe(tmp_path / "p"), tmp_path / "d", tmp_path / "r", *more) == 0
    assert "the holdout's share changed while this was recorded (0.2, 0.5)" in " ".join(capsys.readouterr().out.split())
    found = report_in(tmp_path / "r")
    assert found["settings"]["holdout_share"] == pytest.approx((0 + 0.2 + 0.5) / 3)
    assert found["censoring"]["holdout_as_stated"] is True


def test_a_split_file_keeps_groups_where_they_stand_over_datasets(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "split.json"
    more = ("--split-file", str(file), "--no-baselines", "--no-record")
    assert evaluate(folders / "guard", folders / "d", tmp_path / "r", *more) == 0
    stored = json.loads(file.read_text())
    assert stored["test_reads"] == 1
    groups = evaluation.load(folders / "d").requests.set_index("group")["split"]
    assert stored["parts"] == groups.to_dict()
    # Another export with another salt would put groups elsewhere: what was fitted on under either split is no test.
    rule = SplitRule(shares=(0.3, 0.2, 0.5), group_by="user", salt="other")
    write_dataset(tmp_path / "e", 300, rule=rule)
    assert evaluate(folders / "guard", tmp_path / "e", tmp_path / "s", *more) == 0
    own = evaluation.load(tmp_path / "e").requests.set_index("request_id")
    order = ("fit", "threshold", "test")
    table = pd.read_parquet(tmp_path / "s" / "scores.parquet").set_index("request_id")
    for name, part in table["part"].items():
        assert part == min(own.loc[name, "split"], stored["parts"][own.loc[name, "group"]], key=order.index)
    assert json.loads(file.read_text())["test_reads"] == 2
    write_dataset(tmp_path / "f", 60, rule=SplitRule(shares=(0.0, 0.5, 0.5)))
    capsys.readouterr()
    assert evaluate(folders / "guard", tmp_path / "f", tmp_path / "t", *more) == 1
    assert "it is another dataset's split" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (["--label", "good"], 2, "no label 'good'; it has bad"),
        (["--label", ""], 2, "--label: which one?"),
        (["--source", "nobody"], 2, "label 'bad' has no source 'nobody'; it has ann, judge"),
        (["--judged-by", "nobody"], 2, "has no source 'nobody'"),
        (["--group-by", "tribe"], 2, "no prompt has the metadata 'tribe'; they have language, user"),
        (["--slice", "tribe"], 2, "nothing to slice by called 'tribe'; there are tenant"),
        (["--point", "mlp"], 2, "no point 'mlp'; it has residual"),
        (
            ["--token-labels", "inherit"],
            2,
            "accepted: spans, after-onset; it trains, but says nothing of single tokens",
        ),
        (["--prevalence", "2"], 2, "--prevalence is 2.0; it must lie between 0 and 1"),
        (["--fpr", "0"], 2, "--fpr holds 0.0"),
        (["--split-file", "nowhere/s.json"], 2, "--split-file nowhere/s.json: there is no folder nowhere"),
        (["--since", "2026-01-01"], 2, "--since: says what to read of a topic, but "),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written_or_counted(
    more: list[str], code: int, says: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = evaluation.load(folders / "d").manifest.get("test_reads")
    assert evaluate(folders / "guard", folders / "d", tmp_path / "r", *more) == code
    said = capsys.readouterr().err
    assert says in said
    assert more[0] in said
    assert not (tmp_path / "r").exists()
    assert evaluation.load(folders / "d").manifest.get("test_reads") == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fingerprints": {"model": "abc"}}, "was fitted on model_fingerprint 'abc', the stream has ''"),
        ({"layer": 4}, "reads layer 4, the stream has [3, 5]"),
        ({"width": 8}, "was fitted on width 8, the stream has 4"),
    ],
)
def test_a_probe_that_was_not_fitted_for_the_data_is_refused(
    settings: dict, says: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = write_probe(tmp_path / "p", **settings)
    assert evaluate(probe, folders / "d", tmp_path / "r") == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("rule", "count", "labels", "says"),
    [
        (SplitRule(shares=(0.8, 0.2, 0.0)), 40, True, "no test part (fit 3"),
        (SplitRule(shares=(0.0, 0.0, 1.0)), 2, True, "the test part has 1 positive, 1 negative"),
        (SplitRule(shares=(0.0, 0.0, 1.0)), 1, True, "the test part has 1 positive, 0 negative requests with a usable"),
    ],
)
def test_data_that_cannot_judge_are_refused_or_said_to_be_too_few(
    rule: SplitRule, count: int, labels: bool, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "d", count, rule=rule, labels=labels)
    probe = write_probe(tmp_path / "p")
    assert evaluate(probe, tmp_path / "d", tmp_path / "r", "--source", "ann") == 1
    told = capsys.readouterr().err
    if count == 2:
        assert f"too few requests for a figure: n/a (needs >= 10 positives, has 1); the report is in {tmp_path}" in told
        assert report_in(tmp_path / "r")["auroc"]["value"] is None
    else:
        assert says in told
        assert not (tmp_path / "r").exists()


def test_a_report_is_not_written_over_unasked(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "report.json").write_text("{}")
    assert evaluate(folders / "guard", folders / "d", tmp_path / "r") == 2
    assert "--force replaces it" in capsys.readouterr().err


def test_two_probes_are_compared_on_a_dataset_and_by_their_evaluations(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c"
    arguments = (folders / "guard", folders / "blind", folders / "d", "--out", out, "--label", "bad")
    assert compare(*arguments, "--source", "ann") == 0
    told = capsys.readouterr().out
    found = json.loads((out / "compare.json").read_text())
    jsonschema.validate(found, json.loads((out / "compare.schema.json").read_text()))
    assert found["auroc"]["low"] > 0.1
    assert "guard 1 minus blind 1, on " in told
    assert len(pd.read_parquet(out / "disagreements.parquet")) == len(found["disagreements"]) > 0
    page = (out / "compare.html").read_text()
    assert "guard 1 ranks better: AUROC of guard 1 minus that of blind 1 is " in page
    assert len(page.encode()) < 8_000_000
    # Their reports stand beside it and are compared again, to the same figures.
    assert compare(out / "first", out / "second", "--out", tmp_path / "again") == 0
    assert json.loads((tmp_path / "again" / "compare.json").read_text()) == found
    assert compare(out / "first", out / "first", "--out", tmp_path / "same") == 0
    same = json.loads((tmp_path / "same" / "compare.json").read_text())
    assert (same["auroc"]["value"], same["disagreements"]) == (0.0, [])


def test_a_comparison_says_what_it_lacks(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(folders / "guard", folders / "blind", "--out", tmp_path / "c") == 2
    assert "is a probe: name the SOURCE to judge it on" in capsys.readouterr().err
    assert compare(folders / "d", folders / "d", "--out", tmp_path / "e", "--salt", "x") == 2
    assert "--salt: says what to read of a topic, but two evaluations are compared" in capsys.readouterr().err
    assert compare(tmp_path, tmp_path, "--out", tmp_path / "c") == 1
    assert "holds no report.json; a report is a folder with report.json and scores.parquet" in capsys.readouterr().err
    assert compare(folders / "guard", folders / "blind", folders / "d", "--out", tmp_path / "c") == 2
    assert "--label: which one?" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named_before_any_work(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    before = len(evaluation.load(folders / "d").manifest.get("test_reads", ()))
    assert evaluate(folders / "guard", folders / "d", tmp_path / "file" / "out") == 2
    assert f"--out {tmp_path / 'file' / 'out'}: {tmp_path / 'file'} is no folder" in capsys.readouterr().err
    assert len(evaluation.load(folders / "d").manifest.get("test_reads", ())) == before


def test_a_report_that_does_not_fit_on_the_disk_is_named_and_no_report(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with full_disk(20_000):
        code = evaluate(folders / "guard", folders / "d", out, "--no-record")
    assert code == 1
    told = rf"{out}/report\.\S+: File too large: make room there, or name a place on another disk"
    assert re.search(told, capsys.readouterr().err)
    assert list(out.iterdir()) == []
