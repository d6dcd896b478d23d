"""`undercurrent probe train` on an exported dataset: from recorded requests and labels to a folder a host reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

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
    """Ninety requests; positives are shifted at layer 5 in what they generate, a tenth is unlabelled."""
    made = Topics()
    for number in range(90):
        name, label = f"r{number}", number % 3 == 0
        values = rows(name, TOKENS)
        values[6:, 1, 2] += 4.0 * label
        stream = StreamBuilder(name, layers=LAYERS, prompt_len=PROMPT, dtype="float32")
        made.prompt(name, metadata={"user": f"u{number // 3}"})
        made.activations(stream, stream.start(), stream.block(list(range(TOKENS)), values), stream.end())
        made.answer(name, "ab")
        if number % 10 != 9:
            given = {"token_start": 6, "token_end": 9} if label else {}
            made.label(name, "positive" if label else "negative", **given)
    folder = tmp_path_factory.mktemp("data") / "d"
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


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--kind", "svm"], "--kind: 'svm'; accepted: logistic, mean-difference, lda, mlp, mahalanobis"),
        (["--layers", "5-3"], "--layers: '5-3'; accepted: numbers and ranges"),
        (["--layers", "4"], "no layer 4; it has [3, 5]"),
        (["--token-labels", "last-0"], "--token-labels: 'last-0'; accepted"),
        (["--label", "good"], "no label 'good'; it has bad"),
        (["--point", "mlp"], "no point 'mlp'; it has residual"),
        (["--fpr", "1"], "max_fpr: 1.0; accepted"),
        (["--memory", "0.1"], "MiB are too few for logistic"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(
    more: list[str], says: str, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(dataset, tmp_path / "p", *more) in (1, 2)
    assert says in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
