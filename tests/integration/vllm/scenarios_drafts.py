"""Every tensor, selector and encoding under ngram speculation, in a process of its own as `scenarios_speculation`."""

from __future__ import annotations

from typing import Any

from every_point import STOP, every_points, expert_model
from inprocess import Ask, Capturing
from scenarios import main
from scenarios_speculation import NGRAM, Drafts

FEW = list(range(STOP - 1, STOP + 2))
"""Of so few tokens some are drafted right."""


def asks() -> list[Ask]:
    """Return requests whose texts repeat."""
    prompts = ([STOP + 1], [STOP + 1, STOP + 2] * 9, [STOP - 1, STOP + 2, STOP + 1] * 11, [STOP + 1, STOP - 1] * 30)
    return [
        Ask(f"e{n}", prompt, after=n, params={"max_tokens": 30 + n, "temperature": 1.0, "allowed_token_ids": FEW})
        for n, prompt in enumerate(prompts)
    ] + [Ask(f"greedy{n}", prompt, after=n, params={"max_tokens": 25 + n}) for n, prompt in enumerate(prompts)]


def every(model: str) -> dict[str, Any]:
    experts = expert_model(model)
    points = every_points(experts)
    with Capturing(experts, points, speculative_config=NGRAM) as engine:
        drafts = Drafts(engine.worker.model_runner)
        runs = engine.run(asks())
        counts = {"accepted": drafts.accepted, "rejected": drafts.rejected}
        return {"runs": runs, "points": points, "drafts": counts, "faults": [f.detail for f in engine.log.faults]}


if __name__ == "__main__":
    main({"every": every})
