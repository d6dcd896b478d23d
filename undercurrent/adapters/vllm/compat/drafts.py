"""Speculation: which rows of a step are real once it is known which drafts were accepted.

A slot with drafts has its own rows first, then one row per draft. The sampler keeps the first drafts that the model
agrees with and adds one token; the rows of the drafts after those were computed on tokens that never were.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from undercurrent.errors import CaptureError


class Ends(NamedTuple):
    """What ends a request in the engine, whatever comes after it in the same step.

    Args:
        tokens: that end it.
        length: tokens, prompt and generated, at which it ends.
    """

    tokens: Collection[int]
    length: int

    @classmethod
    def of(cls, state: Any, max_model_len: int) -> Ends:  # noqa: ANN401 - vLLM's CachedRequestState
        """Return those of a request in the V1 runner.

        Args:
            state: of the request.
            max_model_len: of the engine.
        """
        params = state.sampling_params
        tokens = {*(params.stop_token_ids or ()), params.eos_token_id}
        limit = max_model_len if params.max_tokens is None else state.num_prompt_tokens + params.max_tokens
        return cls(tokens, min(limit, max_model_len))


def rows_kept(count: int, drafts: int, computed: int, sampled: Sequence[int], ends: Ends) -> int:
    """Return how many of the first rows of a slot are real.

    Args:
        count: rows of the slot.
        drafts: how many of them, the last ones, are drafts.
        computed: position of the slot's first row.
        sampled: tokens that came out: the accepted drafts and one more.
        ends: what ends the request.

    Raises:
        CaptureError: more drafts were accepted than there were.
    """
    own = count - drafts
    accepted = len(sampled) - 1
    if not 0 <= accepted <= drafts or own < 1:
        raise CaptureError(f"{len(sampled)} tokens came of {drafts} drafts in {count} rows")
    for n, token in enumerate(sampled[:accepted]):
        if token in ends.tokens or computed + own + n + 1 >= ends.length:
            # The text ends with this token: it and what was accepted after it are no input of anything.
            return own + n
    return own + accepted


def drafted(scheduler_output: Any) -> Mapping[str, Sequence[int]]:  # noqa: ANN401 - vLLM's SchedulerOutput
    """Return the drafts of a step, per request that has some."""
    drafts: Mapping[str, Sequence[int]] = scheduler_output.scheduled_spec_decode_tokens
    return drafts
