"""`undercurrent probe train` on an exported dataset: from recorded requests and labels to a folder a host reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.unit.full_disk import full_disk
from tests.unit.probe_consumers.dataset_doubles import Topics, rows
from undercurrent import evaluation
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.evaluation.fit.from_dataset import DatasetRequests, fingerprints_of
from undercurrent.probes import LinearProbe, load_probe
from undercurrent.testing.streams import StreamBuilder

LAYERS = (3, 5)
PROMPT, TOKENS = 2, 12
PLANTED = 5


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("data") / "d")


def exported(folder: Path, spoilt: Mapping[str, int] | None = None) -> Path:
    """Ninety requests; positives are shifted at layer 5 in what they generate, a tenth is unlabelled.

    Args:
        folder: where to.
        spoilt: by request the row that has a value at layer 5 that is not finite.
    """
    made = Topics()
    for number in range(90):
        name, label = f"r{number}", number % 3 == 0
        values = rows(name, TOKENS)
        values[6:, 1, 2] += 4.0 * label
        if name in (spoilt or {}):
            values[(spoilt or {})[name], 1, 0] = np.nan
        stream = StreamBuilder(name, layers=LAYERS, prompt_len=PROMPT, dtype="float32")
        made.prompt(name, metadata={"user": f"u{number // 3}"})
        made.activations(stream, stream.start(), stream.block(list(range(TOKENS)), values), stream.end())
        made.answer(name, "ab")
        if number % 10 != 9:
            given = {"token_start": 6, "token_end": 9} if label else {}
            made.label(name, "positive" if label else "negative", **given)
    made.export(folder)
    return folder


def train(dataset: Path, out: Path, *more: str) -> int:
    return run(app, PROG_NAME, ["probe", "train", str(dataset), "--out", str(out), "--label", "bad", *more])


@pytest.mark.parametrize("kind", ["logistic", "lda", "mlp", "mahalanobis"])
def test_the_planted_layer_is_found_and_the_folder_loads(
    kind: str, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "guard"
    assert train(dataset, out, "--kind", kind, "--fpr", "0.1", "--folds", "3") == 0
    text = capsys.readouterr().out
    assert f"{out}: {kind}, layer {PLANTED} of residual_stream" in text
    assert "the best of several is optimistic until a test split has judged it" in text
    assert load_probe(str(out)).fingerprint
    metrics = json.loads((out / "metrics.json").read_text())
    data = evaluation.load(dataset)
    counted = data.requests[data.requests["split"] == "fit"]["label.bad"].value_counts()
    assert metrics["fit"]["positives"] == counted["positive"]
    assert metrics["fit"]["unlabelled"] == counted["unknown"]
    assert not data.manifest.get("test_reads")


def test_settings_reach_the_folder(dataset: Path, tmp_path: Path) -> None:
    more = ["--layers", "5", "--aggregation", "max", "--strength", "0.1", "--token-labels", "after-onset"]
    assert train(dataset, tmp_path / "p", *more, "--positions", "generated", "--name", "guard", "--mode", "flag") == 0
    probe = LinearProbe.from_folder(tmp_path / "p")
    config = probe.artefact.config
    assert (config.name, config.mode, config.positions, config.layer) == ("guard", "flag", "generated", 5)
    prints = fingerprints_of(evaluation.load(dataset))
    # No adapter was used, which is a fact: a stream with one is refused.
    assert prints["lora"] == ""
    assert config.fingerprints.model_dump(exclude_none=True) == prints
    assert json.loads((tmp_path / "p" / "metrics.json").read_text())["choice"] is None


def test_rows_with_a_value_that_is_not_finite_are_left_out_and_counted(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"point": "residual", "split": "fit", "label": "bad", "rule": "spans"}
    before = {request.request_id: request for request in DatasetRequests(data=evaluation.load(dataset), **given)}
    name = next(iter(before))
    spoilt = exported(tmp_path / "spoilt", {name: 7})
    part = DatasetRequests(data=evaluation.load(spoilt), **given)
    for _ in range(2):  # a split is read several times
        after = {request.request_id: request for request in part}
        assert part.left_out == {name: 1}
        assert after[name].positions.tolist() == np.delete(before[name].positions, 7).tolist()
        assert all(np.isfinite(rows).all() for rows in after[name].rows.values())
        assert after[name].prompt_len == PROMPT
        labels = before[name].token_labels
        assert after[name].token_labels.tolist() == np.delete(labels, 7).tolist()
    assert train(spoilt, tmp_path / "p", "--layers", "5", "--kind", "lda", "--folds", "2") == 0
    assert "1 row of 1 request in the fit split left out: a value is not finite" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "p" / "metrics.json").read_text())
    assert metrics["fit"]["not_finite"] == {"requests": 1, "rows": 1}
    assert "not_finite" not in metrics["threshold"]


def test_token_labels_are_those_of_the_spans(dataset: Path) -> None:
    data = evaluation.load(dataset)
    given = {"data": data, "point": "residual", "split": "fit", "label": "bad"}
    spans = {r.request_id: r for r in DatasetRequests(**given, rule="spans")}
    plain = {r.request_id: r for r in DatasetRequests(**given)}
    assert spans.keys() == plain.keys()
    for name, request in spans.items():
        number = int(name[1:])
        assert plain[name].token_labels is None
        assert request.prompt_len == PROMPT
        expected = None if number % 10 == 9 else number % 3 == 0
        assert request.label is expected
        if expected:
            assert request.token_labels is not None
            assert np.flatnonzero(request.token_labels == 1).tolist() == [6, 7, 8]
    groups = {name: request.group for name, request in plain.items()}
    assert len(set(groups.values())) == len(groups)


def test_a_training_is_told_to_wandb_without_a_network(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, as a user runs it: the library starts a service and ends it with the process."""
    out = tmp_path / "guard"
    argv = ["probe", "train", str(dataset), "--out", str(out), "--label", "bad", "--log-to", "wandb"]
    done = subprocess.run(
        [sys.executable, "-m", "undercurrent.cli", *argv, "--layers", "5", "--kind", "lda", "--folds", "2"],
        env=os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "logged to wandb, offline in " in done.stdout
    [written] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # Compressed; what it is told, name by name, stands in the test of tracking.
    assert written.read_bytes().startswith(b":W&B")
    assert written.stat().st_size > 1000


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--kind", "svm"], "--kind: 'svm'; accepted: logistic, mean-difference, lda, mlp, mahalanobis"),
        (["--layers", "5-3"], "--layers: '5-3'; accepted: numbers and ranges"),
        (["--layers", "4"], "no layer 4; it has [3, 5]"),
        (["--token-labels", "last-0"], "--token-labels: 'last-0'; accepted"),
        (["--label", "good"], "no label 'good'; it has bad"),
        (["--point", "mlp"], "no point 'mlp'; it has residual"),
        (["--fpr", "1"], "--fpr: 1.0; accepted"),
        (["--fpr", "nan"], "--fpr: nan; accepted"),
        (["--aggregation", "median"], "--aggregation {'kind': 'median'}"),
        (["--layers", "0-99999999999"], "--layers: '0-99999999999'; accepted: numbers and ranges"),
        (["--memory", "inf"], "'--memory'"),
        (["--log-to", "tensorboard"], "--log-to: 'tensorboard'; accepted: mlflow, wandb"),
        (["--memory", "0.1"], "MiB are too few for logistic"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(
    more: list[str], says: str, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(dataset, tmp_path / "p", *more) in (1, 2)
    assert says in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_a_probe_that_does_not_fit_on_the_disk_leaves_the_one_that_was_there(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p"
    assert train(dataset, out, "--layers", "5") == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with full_disk(256):
        code = train(dataset, out, "--layers", "3", "--force")
    assert code == 1
    assert re.search(r"/p/\S+: File too large: make room there", capsys.readouterr().err)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
