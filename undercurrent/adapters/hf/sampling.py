"""From the logits of a request to its next token, with the parameters and in the order that vLLM has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from undercurrent.errors import BadRequestError
from undercurrent.protocol.messages import Sampling

DEFAULT_MAX_TOKENS = 16
_GREEDY_BELOW = 1e-5
_SEEDS = 1 << 63

_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, math.inf, "at least 0"),
    ("top_p", math.nextafter(0.0, 1.0), 1.0, "above 0 and at most 1"),
    ("min_p", 0.0, 1.0, "from 0 to 1"),
    ("presence_penalty", -2.0, 2.0, "from -2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "from -2 to 2"),
    ("repetition_penalty", math.nextafter(0.0, 1.0), math.inf, "above 0"),
    ("top_k", -1, math.inf, "at least 1, or 0 or -1 for all"),
    ("max_tokens", 1, math.inf, "at least 1"),
    ("n", 1, math.inf, "at least 1"),
    ("seed", -_SEEDS, _SEEDS - 1, "a signed number of 64 bits"),
)
_WHOLE = frozenset({"top_k", "max_tokens", "n", "seed"})


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Check sampling parameters.

    Args:
        sampling: null fields are fine.
        vocab_size: of the model.

    Raises:
        BadRequestError: one is out of its range.
    """
    for name, low, high, words in _RANGES:
        value: Any = getattr(sampling, name)
        if value is None:
            continue
        kinds = (int,) if name in _WHOLE else (int, float)
        # Not a number compares false with everything, so it is refused here, too.
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high or math.isinf(value):
            raise BadRequestError(f"bad sampling parameters: {name} is {value!r:.40}; it must be {words}")
    if any(not isinstance(text, str) or not text for text in sampling.stop):
        raise BadRequestError("bad sampling parameters: stop must be texts that are not empty")
    if any(not 0 <= token < vocab_size for token in sampling.stop_token_ids):
        raise BadRequestError(f"bad sampling parameters: a stop token id is outside 0 to {vocab_size - 1}")


class Sampler:
    """Chooses the tokens of one child of a request.

    Args:
        sampling: checked.
        index: of the child; each child of a seeded request has a seed of its own.
    """

    def __init__(self, sampling: Sampling, index: int = 0) -> None:
        temperature = 1.0 if sampling.temperature is None else float(sampling.temperature)
        self._greedy = temperature < _GREEDY_BELOW
        self._presence = float(sampling.presence_penalty or 0.0)
        self._frequency = float(sampling.frequency_penalty or 0.0)
        repetition = float(sampling.repetition_penalty or 1.0)
        self._repetition = RepetitionPenaltyLogitsProcessor(repetition) if repetition != 1.0 else None
        self._warpers = [] if self._greedy else _warpers(sampling, temperature)
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((sampling.seed + index) % (2 * _SEEDS))

    def choose(self, logits: torch.Tensor, prompt: Sequence[int], generated: Sequence[int]) -> int:
        """Return the next token id.

        Args:
            logits: of the next token, float32 on the CPU [vocabulary].
            prompt: token ids of the prompt.
            generated: token ids so far.
        """
        scores = logits.unsqueeze(0)
        # Only what needs the tokens so far gets them: to copy them costs more than all the rest.
        if self._repetition is not None:
            scores = self._repetition(torch.tensor([[*prompt, *generated]]), scores)
        if (self._presence or self._frequency) and generated:
            scores = self._penalised(scores, generated)
        if self._greedy:
            return int(scores.argmax())
        nothing = torch.empty((1, 0), dtype=torch.long)
        for warper in self._warpers:
            scores = warper(nothing, scores)
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator))

    def _penalised(self, scores: torch.Tensor, generated: Sequence[int]) -> torch.Tensor:
        counts = torch.bincount(torch.tensor(generated), minlength=scores.shape[-1]).to(scores.dtype)
        return scores - self._frequency * counts - self._presence * (counts > 0)


def _warpers(sampling: Sampling, temperature: float) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = []
    if temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(temperature))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(float(sampling.min_p)))
    if sampling.top_k is not None and sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(int(sampling.top_k)))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(float(sampling.top_p)))
    return warpers
