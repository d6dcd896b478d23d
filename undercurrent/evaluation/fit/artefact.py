"""A trained probe as a folder: what a probe host reads, and beside it what people should know of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undercurrent.counts import counted
from undercurrent.evaluation.fit.fitted import TrainableProbe
from undercurrent.files import together, write_text
from undercurrent.probes.folder import CONFIG_NAME

METRICS_FORMAT = "undercurrent.probe-metrics/1"
METRICS_NAME = "metrics.json"
CARD_NAME = "README.md"
UNJUDGED = "No test split has judged it yet."
"""What the card says until an evaluation writes its figures in this place."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedProbe:
    """A probe and the figures of its making.

    Args:
        probe: ready to judge.
        metrics: the content of `metrics.json`.
    """

    probe: TrainableProbe
    metrics: Mapping[str, Any]

    def save(self, folder: str | Path) -> None:
        """Write `probe.safetensors`, `probe.json`, `metrics.json` and `README.md`; the folder is made.

        Raises:
            OSError: naming the file that cannot be written; what was there is as it was.
        """
        text = json.dumps(self.metrics, indent=2, ensure_ascii=False, allow_nan=False)
        with together(Path(folder), last=CONFIG_NAME) as fresh:
            self.probe.save(fresh)
            write_text(fresh / METRICS_NAME, text + "\n")
            write_text(fresh / CARD_NAME, card(self.probe, self.metrics))


def card(probe: TrainableProbe, metrics: Mapping[str, Any]) -> str:
    """Return the model card, in Markdown with a YAML header."""
    config = probe.artefact.config
    parts = [
        f"---\nlibrary_name: undercurrent\ntags: [activation-probe, {metrics['kind']}]\n---\n",
        f"# {config.name} {config.version}\n",
        config.description or "An activation probe.",
        "\n## What it does\n",
        f"Reads layer {config.layer} (0-based, the block's output) of `{config.tensor_type.value}`, "
        f"{probe.artefact.width} wide, and scores {_tokens(config.positions)} by {_HOW[metrics['kind']]} "
        f"(`{config.format}`). Scores are aggregated by `{config.aggregation.kind}`; it acts where the aggregate "
        f"reaches {config.threshold:.6g}.\n",
        f"Fitted on model `{config.fingerprints.model}`: it refuses the streams of others.\n"
        if config.fingerprints.model
        else "No model fingerprint is stated, so it takes the streams of any model of its width.\n",
        "## How it was made\n",
        _fit_text(metrics["fit"]),
        _choice_text(metrics),
        "\n## What to expect\n",
        _threshold_text(metrics["threshold"]),
        f"\n{UNJUDGED}\n" if metrics["test"] is None else "",
        "\n## Use\n",
        f"```yaml\nbindings:\n  - name: {config.name}\n    point: POINT   # captures layer {config.layer} of "
        f"{config.tensor_type.value}\n    probe: ./{config.name}\n    mode: {config.mode or 'shadow'}\n```\n",
        "All figures: `metrics.json`.\n",
    ]
    return "\n".join(part for part in parts if part)


def _tokens(positions: str) -> str:
    return "every token" if positions == "all" else f"every token of the {_NOUNS[positions]}"


_HOW = {
    "logistic": "a direction from logistic regression",
    "mean-difference": "the standardised direction from one class's mean to the other's",
    "lda": "a direction from linear discriminant analysis",
    "mlp": "a small multilayer perceptron",
    "mahalanobis": "the Mahalanobis distance from what negatives look like",
}
_NOUNS = {"generated": "answer", "prompt": "prompt"}


def _fit_text(fit: Mapping[str, Any]) -> str:
    return (
        f"Fitted on {counted(fit['requests'], 'request')} ({fit['positives']:,} positive) of "
        f"{counted(fit['groups'], 'group')}, {fit['tokens']:,} tokens of which {fit['sampled_tokens']:,} were "
        f"sampled (at most {fit['tokens_per_request']} a request); each request weighs the same. "
        f"{counted(fit['unlabelled'], 'unlabelled request was', 'unlabelled requests were')} left out.\n"
    )


def _choice_text(metrics: Mapping[str, Any]) -> str:
    choice, chosen = metrics["choice"], metrics["chosen"]
    if choice is None:
        return "Nothing was chosen: one layer, one strength and one aggregation were given.\n"
    rows = [
        f"| {site['layer']} | {site['tensor_type']} | {site['auroc']:.3f} | {site['low']:.3f} to {site['high']:.3f} |"
        for site in choice["sites"]
    ]
    return "\n".join(
        [
            f"Layer {chosen['layer']}, strength {chosen['strength']:g} and `{chosen['aggregation']['kind']}` are the "
            f"best of {len(choice['tried'])} on held-out groups of the fit split ({choice['folds']} folds). The best "
            f"of several flatters itself: its figure is optimistic until a test split has judged it.\n",
            "| layer | tensor | AUROC of requests | 95 % |\n|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _threshold_text(figures: Mapping[str, Any]) -> str:
    backed = figures.get("wanted_fpr_is_backed")
    lines = [
        f"The threshold was placed for at most {figures['wanted_fpr']:.2%} false positives on "
        f"{counted(figures['negatives'], 'negative request')} of the threshold split.",
        f"- false positive rate there: {_rate(figures['fpr'])}",
        f"- true positive rate there: {_rate(figures['tpr'])}" if "tpr" in figures else "",
        f"- whether that many negatives can tell such a rate: {backed}" if isinstance(backed, str) else "",
        f"- stated for requests of up to {counted(figures['holds_up_to_tokens'], 'counted token')}: longer ones have "
        f"more chances to reach a threshold",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _rate(figure: Any) -> str:  # noqa: ANN401 - a proportion as plain data, or why there is none
    if isinstance(figure, str):
        return figure
    if figure.get("weighted"):
        return f"{figure['value']:.2%} (weighted by sampling)"
    return (
        f"{figure['value']:.2%} ({figure['count']} of {figure['n']}; 95 %: {figure['low']:.2%} to {figure['high']:.2%})"
    )
