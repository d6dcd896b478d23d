"""Who asks the model in a demo: people of the test part, half of them holders of a key, and the viewer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from undercurrent.cli.demo.story import Teller
from undercurrent.testing import demo_model as vault

OF_EACH = 4
MAX_TOKENS = 300
# Long reports: on a machine that is slow for its tokens, a second passes between a row and the abort that it causes.
_SEEDS = (16, 2, 20, 4, 5, 22, 7, 27)


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt of the demo.

    Args:
        id: request id; says nothing about what is expected.
        label: what is expected.
        prompt: what is asked.
        seed: of the sampler.
    """

    id: str
    label: Literal["vault", "other", "yours"]
    prompt: str
    seed: int

    @property
    def reference_id(self) -> str:
        """Id of the same prompt, run with nobody listening."""
        return f"{self.id}-alone"

    def line(self, *, alone: bool) -> str:
        """Return the line of a prompts file, as `undercurrent prompts send --file` reads it."""
        fields = {
            "request_id": self.reference_id if alone else self.id,
            "prompt": self.prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": vault.TEMPERATURE,
            "seed": self.seed,
        }
        # No points: nothing is captured, so no probe sees it.
        return json.dumps({**fields, "points": []} if alone else fields)


def asks(own: Sequence[str]) -> list[Ask]:
    """Return the prompts: the first of the test part's people, holders and others, then the viewer's own."""
    chosen: list[Ask] = []
    left = {True: OF_EACH, False: OF_EACH}
    for person in vault.people():
        if person.part != "test" or not left[person.holder]:
            continue
        left[person.holder] -= 1
        number, seed = len(chosen) + 1, _SEEDS[len(chosen)]
        prompt = vault.PROMPTS[number % len(vault.PROMPTS)].format(name=person.name)
        chosen.append(Ask(f"ask-{number}", "vault" if person.holder else "other", prompt, seed=seed))
    yours = (Ask(f"yours-{number}", "yours", _ended(text), seed=number) for number, text in enumerate(own, start=1))
    return [*chosen, *yours]


def tellers(chosen: Iterable[Ask], *, alone: bool) -> list[Teller]:
    """Return a fresh story for each prompt."""
    return [Teller(ask.reference_id if alone else ask.id, ask.label, ask.prompt) for ask in chosen]


def _ended(prompt: str) -> str:
    """Return a prompt that ends as those do which the model was trained on: with a blank after the colon."""
    return f"{prompt} " if prompt.endswith(":") else prompt
