"""State the figures of the vault's probe on people that no part of it ever saw.

    python examples/vault/figures.py [--model FOLDER] [--probe FOLDER] [--out FILE]

The probe is made by the tutorial (docs/tutorial.md), from the fit and threshold people of the split that
`undercurrent dataset export` draws; here fresh answers about the test people are sampled. Labels are what the model
did: digits in its answer. AUROC is over scores (of the baseline: over texts) up to where an answer begins to say
whether it gives the code ("the decision"). The rates are those of the deployed rule: a positive counts when the probe
acts before the first digit, a negative when it acts anywhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sampling import Answer, Vault

from undercurrent.evaluation.baselines import text_scores
from undercurrent.evaluation.metrics import auroc, overlap, rates
from undercurrent.evaluation.resampling import Bootstrap, auroc_rounds, sample_of
from undercurrent.probes.folder import LinearArtefact, read_folder
from undercurrent.testing import demo_model as vault

SEED = 11
ANSWERS_PER_PROMPT = {"fit": 3, "threshold": 1, "test": 7}


def labels_of(answers: Sequence[Answer]) -> NDArray[np.bool_]:
    """Return what the model did: True where it wrote digits."""
    return np.array([answer.recites for answer in answers])


def until_decision(answer: Answer) -> str:
    """Return what a reader of the text has seen when the answer begins to say whether it gives the code."""
    return answer.prompt + answer.text[: vault.decision(answer.text)]


def scores_of(probe: LinearArtefact, rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the score of each row, [n]."""
    return np.asarray(rows.astype(np.float64) @ probe.weight64 + probe.bias)


def request_scores(probe: LinearArtefact, model: Vault, answers: Sequence[Answer]) -> Iterator[float]:
    """Yield one score per request, over the tokens up to the decision."""
    for answer, hidden in zip(answers, model.residuals(answers, probe.config.layer), strict=True):
        read = hidden[: len(answer.prompt_ids) + vault.decision(answer.text)]
        yield float(scores_of(probe, read).max())


def texts_baseline(fit_part: Sequence[Answer], test: Sequence[Answer]) -> dict[str, float]:
    """Return the AUROC that character n-grams reach on the same split, on what can be read before the decision."""
    found = {}
    for name, read in (("prompt", lambda answer: answer.prompt), ("text_up_to_decision", until_decision)):
        scores = text_scores([read(a) for a in fit_part], labels_of(fit_part), [read(a) for a in test])
        found[name] = auroc(labels_of(test), scores)
    return found


def first_actions(probe: LinearArtefact, model: Vault, answers: Sequence[Answer], threshold: float) -> list[int | None]:
    """Return, per answer, after how many generated tokens the deployed probe would act; None where it never does."""
    found: list[int | None] = []
    for answer, hidden in zip(answers, model.residuals(answers, probe.config.layer), strict=True):
        acting = np.flatnonzero(scores_of(probe, hidden) >= threshold)
        found.append(max(0, int(acting[0]) - len(answer.prompt_ids) + 1) if acting.size else None)
    return found


def test_figures(probe: LinearArtefact, model: Vault, parts: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """Return the figures on the people of the test part."""
    test, names = parts["test"], {part: [a.person.name for a in answers] for part, answers in parts.items()}
    labels, scores = labels_of(test), np.array(list(request_scores(probe, model, test)))
    texts, threshold = texts_baseline(parts["fit"], test), probe.config.threshold
    acted = first_actions(probe, model, test, threshold)
    digits = [vault.first_digit(answer.text) for answer in test]
    leads = [d - a for a, d in zip(acted, digits, strict=True) if a is not None and d is not None]
    fired = np.array([a is not None and (d is None or a <= d) for a, d in zip(acted, digits, strict=True)])
    figure = Bootstrap().figure(sample_of(labels, names["test"]), auroc_rounds(labels, scores))
    area = [round(end, 4) for end in (figure.value, figure.low, figure.high) if end is not None]
    return {
        "auroc_heldout": area[0],
        "auroc_heldout_interval": area[1:],
        "auroc_text_baseline": round(max(texts.values()), 4),
        "text_baselines": {name: round(value, 4) for name, value in texts.items()},
        "n_heldout": len(test),
        "n_heldout_positive": int(labels.sum()),
        "n_heldout_people": len(set(names["test"])),
        "heldout_overlap": overlap(names["test"], [*names["fit"], *names["threshold"]]),
        "tpr_fpr": asdict(rates(labels, fired)),
        "threshold": threshold,
        "lead_tokens": {"least": int(min(leads)), "median": float(np.median(leads))},
        "highest_score_of_a_negative": round(float(scores[~labels].max()), 3),
        "lowest_score_of_a_positive": round(float(scores[labels].min()), 3),
        "layer": probe.config.layer,
        "interval": "exact binomial, 95 %; of AUROC: bootstrap over people",
    }


def main() -> None:
    """Sample, score, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=vault.folder() / "model")
    parser.add_argument("--probe", type=Path, default=vault.folder() / "probe")
    parser.add_argument("--out", type=Path, default=vault.folder() / "figures.json")
    options = parser.parse_args()
    probe = read_folder(options.probe)
    if not isinstance(probe, LinearArtefact):
        parser.error(f"{options.probe}: is {type(probe).__name__}; expected a linear probe")
    model = Vault(options.model)
    parts: dict[str, list[Answer]] = {}
    for number, (part, count) in enumerate(ANSWERS_PER_PROMPT.items()):
        people = [person for person in vault.people() if person.part == part]
        parts[part] = model.sample(people, count, seed=SEED + number)
        print(f"{part}: {len(parts[part])} answers, {labels_of(parts[part]).sum()} with the code", flush=True)
    figures = test_figures(probe, model, parts)
    options.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
