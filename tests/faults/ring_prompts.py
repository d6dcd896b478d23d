"""Prompts of a seed, and everything that follows from each: a plain loop, which reads no topic."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from undercurrent.protocol.messages import PromptRequest, Sampling
from undercurrent.testing.fake_engine import activation

POINT = "residual"
WIDTH = 16


@dataclass(frozen=True)
class Judge:
    """A probe that shows one element of one layer's rows, so that its scores are known to the last bit.

    Attributes:
        layer: whose rows it reads.
        element: of the row.
        threshold: it acts from here on.
        mode: what it may do.
    """

    layer: int
    element: int
    threshold: float
    mode: str


JUDGES = {"watch": Judge(2, 3, 0.95, "flag"), "guard": Judge(0, 5, 0.9999, "abort")}


@dataclass(frozen=True)
class Asked:
    """One prompt, and everything that follows from it."""

    request_id: str
    prompt: str
    tokens: int

    @property
    def rows(self) -> int:
        """Positions that the engine computes of it where nobody stops it."""
        return len(self.prompt) + self.tokens - 1

    @cached_property
    def scores(self) -> dict[str, list[np.float32]]:
        """Each judge's scores, by position."""
        return {
            name: [activation(self.request_id, at, judge.layer, WIDTH)[judge.element] for at in range(self.rows)]
            for name, judge in JUDGES.items()
        }

    def acts_at(self, name: str) -> int | None:
        """Return the position at which a judge acts, None where it never does."""
        scores = self.scores[name]
        return next((at for at, score in enumerate(scores) if float(score) >= JUDGES[name].threshold), None)

    def request(self) -> PromptRequest:
        """Return the prompt as it is sent."""
        sampling = Sampling(max_tokens=self.tokens)
        return PromptRequest(request_id=self.request_id, prompt=self.prompt, sampling=sampling, created_at_us=0)


def prompts_of(seed: int, first: int, count: int, tokens: tuple[int, int]) -> list[Asked]:
    """Return prompts by seed and number: a plain loop."""
    found = []
    for number in range(first, first + count):
        rng = random.Random(f"{seed}/{number}")
        found.append(Asked(f"s{seed}-{number}", "p" * rng.randint(1, 9), rng.randint(*tokens)))
    return found
