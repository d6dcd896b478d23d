"""How many rows and records requests make at a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from undercurrent.errors import ConfigError
from undercurrent.spec import ExtractionPoint

_MOST_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a deployment serves, on average.

    Args:
        requests_per_s: requests that begin, per second.
        tokens_per_s: tokens generated, per second.
        prompt_tokens: of a request.
        cached_tokens: of a prompt, that are read from the prefix cache and so never computed.
        token_ms: from one token of a request to its next.

    Raises:
        ConfigError: a number is none that can be served; the error names the option.
    """

    requests_per_s: float
    tokens_per_s: float
    prompt_tokens: float
    cached_tokens: float = 0.0
    token_ms: float = 25.0

    def __post_init__(self) -> None:
        for name in ("requests_per_s", "tokens_per_s", "prompt_tokens", "token_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{name.replace('_', '-')}: {value:g}; accepted: a number above 0")
        if not 1 <= self.prompt_tokens <= _MOST_TOKENS:
            raise ConfigError(f"--prompt-tokens: {self.prompt_tokens:g}; accepted: at least 1, up to {_MOST_TOKENS}")
        if self.generated < 1:
            raise ConfigError(
                f"--tokens-per-s: {self.tokens_per_s:g}; accepted: at least --requests-per-s, "
                f"{self.requests_per_s:g}, since each request generates a token"
            )
        if self.generated > _MOST_TOKENS:
            raise ConfigError(
                f"--tokens-per-s: {self.tokens_per_s:g}; accepted: up to {_MOST_TOKENS} for each of --requests-per-s, "
                f"{self.requests_per_s:g}"
            )
        if not 0 <= self.cached_tokens < self.prompt_tokens:
            raise ConfigError(
                f"--cached-tokens: {self.cached_tokens:g}; accepted: from 0 to below --prompt-tokens, "
                f"{self.prompt_tokens:g}, since the last token of a prompt is always computed"
            )

    @property
    def generated(self) -> float:
        """Tokens that a request generates."""
        return self.tokens_per_s / self.requests_per_s

    @property
    def request_s(self) -> float:
        """How long a request generates, seconds."""
        return self.generated * self.token_ms / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one request at one point.

    Args:
        prompt: captured of the prompt, in one step unless that is too long for a record.
        generated: captured of what is generated, one a step.
        steps: after the prompt's in which these leave, of a request of the length nearest to the average.
    """

    prompt: float
    generated: float
    steps: tuple[int, ...] = ()

    @property
    def total(self) -> float:
        """All of them."""
        return self.prompt + self.generated


def rows_of(point: ExtractionPoint, traffic: Traffic) -> Rows:
    """Return the rows of an average request at a point.

    The last token is never computed, so prompt + generation - 1 positions are. A token that ends a point is taken for
    never met.
    """
    prompt, cached = max(1, round(traffic.prompt_tokens)), round(traffic.cached_tokens)
    if point.needs_final_length:
        # What a position from the end means is known when the request has ended.
        return Rows(prompt=0.0, generated=1.0, steps=(round(traffic.generated),))
    low = math.floor(traffic.generated)
    share = traffic.generated - low
    counts = [len(_generated(point, prompt, tokens)) for tokens in (low, low + 1)]
    nearest = _generated(point, prompt, round(traffic.generated))
    return Rows(
        prompt=float(len(point.positions(cached, prompt, prompt))),
        generated=counts[0] * (1 - share) + counts[1] * share,
        steps=tuple(int(position) - prompt + 1 for position in nearest),
    )


def _generated(point: ExtractionPoint, prompt: int, tokens: int) -> Sequence[int]:
    return point.positions(prompt, prompt + tokens - 1, prompt)
