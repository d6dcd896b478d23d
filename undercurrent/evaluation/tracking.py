"""Trainings told to an experiment tracker: MLflow or Weights & Biases, each as it is configured, offline too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from undercurrent.errors import ConfigError

PROJECT = "undercurrent"


class Tracker(StrEnum):
    """Where to."""

    MLFLOW = "mlflow"
    WANDB = "wandb"


Log = Callable[[Path, str, Mapping[str, Any]], str]
"""Takes a probe's folder, its name and the content of `metrics.json`; returns in words where it was logged."""


def open_tracker(tracker: Tracker) -> Log:
    """Return what logs a training; the library itself reads where to from its own variables and files.

    Raises:
        ConfigError: its library is not installed.
    """
    try:
        module = import_module(tracker.value)
    except ImportError as exc:
        raise ConfigError(
            f"--log-to {tracker.value}: {exc}; install the extra `track`: pip install 'undercurrent[track]'"
        ) from exc
    log = _mlflow if tracker is Tracker.MLFLOW else _wandb
    return lambda folder, name, metrics: log(module, folder, name, metrics)


def _mlflow(mlflow: Any, folder: Path, name: str, metrics: Mapping[str, Any]) -> str:  # noqa: ANN401 - not typed
    with mlflow.start_run(run_name=name) as run:
        mlflow.log_params(parameters(metrics))
        mlflow.log_metrics(figures(metrics))
        mlflow.log_artifacts(str(folder), artifact_path="probe")
    return f"logged to mlflow, run {run.info.run_id} at {mlflow.get_tracking_uri()}"


def _wandb(wandb: Any, folder: Path, name: str, metrics: Mapping[str, Any]) -> str:  # noqa: ANN401 - not typed
    # An exception inside marks the run as failed; it is finished either way.
    with wandb.init(project=PROJECT, name=name, job_type="train", config=parameters(metrics)) as run:
        run.summary.update(figures(metrics))
        artefact = wandb.Artifact(name=_artefact_name(name), type="probe")
        artefact.add_dir(str(folder))
        run.log_artifact(artefact)
    return f"logged to wandb, {run.url or f'offline in {run.dir}'}"


def parameters(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a training was told and what it chose, flat."""
    wanted = {name: metrics[name] for name in ("kind", "seed", "chosen")}
    return {
        **dict(_flat(wanted)),
        "wanted_fpr": metrics["threshold"]["wanted_fpr"],
        "tokens_per_request": metrics["fit"]["tokens_per_request"],
    }


def figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a training that are numbers, flat: of a proportion also its count and interval."""
    wanted = {name: metrics[name] for name in ("fit", "threshold", "test") if metrics.get(name)}
    found = {name: float(value) for name, value in _flat(wanted) if isinstance(value, int | float)}
    for site in (metrics.get("choice") or {"sites": ()})["sites"]:
        found[f"held_out.{site['tensor_type']}.{site['layer']}.auroc"] = float(site["auroc"])
    return found


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{before}{name}.")
        elif not isinstance(item, list | tuple) and item is not None:
            yield f"{before}{name}", item


def _artefact_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
