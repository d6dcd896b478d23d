"""A training is told to a tracker: parameters, figures and the folder; what is not installed is said first."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from undercurrent.errors import ConfigError
from undercurrent.evaluation.tracking import Tracker, figures, open_tracker, parameters

METRICS = {
    "kind": "lda",
    "seed": 3,
    "chosen": {"layer": 5, "tensor_type": "residual_stream", "strength": 0.1, "aggregation": {"kind": "max"}},
    "fit": {"requests": 60, "tokens_per_request": 32},
    "choice": {"sites": [{"layer": 5, "tensor_type": "residual_stream", "auroc": 0.9}], "tried": [{"auroc": 1}]},
    "threshold": {"wanted_fpr": 0.01, "value": 1.5, "fpr": {"value": 0.0, "n": 12}, "tpr": "n/a (needs more)"},
    "test": None,
}


class FakeMlflow(SimpleNamespace):
    """Notes what it is told, as MLflow's module is called."""

    def __init__(self):
        super().__init__(told=[])

    @contextmanager
    def start_run(self, **fields):
        self.told.append(("start_run", fields))
        yield SimpleNamespace(info=SimpleNamespace(run_id="r1"))
        self.told.append(("end_run", None))

    def log_params(self, params):
        self.told.append(("params", params))

    def log_metrics(self, metrics):
        self.told.append(("metrics", metrics))

    def log_artifacts(self, folder, artifact_path):
        self.told.append(("artifacts", (folder, artifact_path)))

    def get_tracking_uri(self):
        return "file:runs"


def test_parameters_and_figures_are_flat():
    assert parameters(METRICS) == {
        "kind": "lda",
        "seed": 3,
        "chosen.layer": 5,
        "chosen.tensor_type": "residual_stream",
        "chosen.strength": 0.1,
        "chosen.aggregation.kind": "max",
        "wanted_fpr": 0.01,
        "tokens_per_request": 32,
    }
    assert figures(METRICS) == {
        "fit.requests": 60.0,
        "fit.tokens_per_request": 32.0,
        "threshold.wanted_fpr": 0.01,
        "threshold.value": 1.5,
        "threshold.fpr.value": 0.0,
        "threshold.fpr.n": 12.0,
        "held_out.residual_stream.5.auroc": 0.9,
    }


def test_mlflow_is_told_everything_within_one_run(monkeypatch, tmp_path):
    module = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    said = open_tracker(Tracker.MLFLOW)(tmp_path, "guard 2", METRICS)
    assert said == "logged to mlflow, run r1 at file:runs"
    assert module.told == [
        ("start_run", {"run_name": "guard 2"}),
        ("params", parameters(METRICS)),
        ("metrics", figures(METRICS)),
        ("artifacts", (str(tmp_path), "probe")),
        ("end_run", None),
    ]


class FakeRun:
    """A run of the fake below; its config and summary are read afterwards."""

    url, dir = None, "wandb/offline-run-1/files"

    def __init__(self, fields):
        self.fields, self.summary, self.artefacts, self.exit = fields, {}, [], "open"

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.exit = kind

    def log_artifact(self, artefact):
        self.artefacts.append(artefact)


class FakeArtefact(SimpleNamespace):
    def add_dir(self, folder):
        self.folder = folder


def test_wandb_is_told_everything_within_one_run(monkeypatch, tmp_path):
    runs = []

    def init(**fields):
        runs.append(FakeRun(fields))
        return runs[0]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Artifact=FakeArtefact))
    said = open_tracker(Tracker.WANDB)(tmp_path, "guard: 2", METRICS)
    assert said == "logged to wandb, offline in wandb/offline-run-1/files"
    [run] = runs
    expected = {"project": "undercurrent", "name": "guard: 2", "job_type": "train", "config": parameters(METRICS)}
    assert (run.fields, run.summary, run.exit) == (expected, figures(METRICS), None)
    [artefact] = run.artefacts
    assert (artefact.name, artefact.type, artefact.folder) == ("guard--2", "probe", str(tmp_path))


@pytest.mark.parametrize("tracker", list(Tracker))
def test_a_library_that_is_not_there_names_the_extra(tracker, monkeypatch):
    monkeypatch.setitem(sys.modules, tracker.value, None)
    with pytest.raises(ConfigError, match=rf"--log-to {tracker}: .*install the extra `track`"):
        open_tracker(tracker)
