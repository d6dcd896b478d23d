"""Which row of a flattened step is which token of which request: the reference that anybody can read.

The capture path keeps prepared plans instead (`capture.plan`); both are held against each other in tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from undercurrent.adapters.vllm.introspection import StepBatchMetadata
from undercurrent.errors import SeqMapperError

__all__ = ["SeqIdMapper", "SeqMapperError", "TokenRowMapping"]


@dataclass(frozen=True, slots=True)
class TokenRowMapping:
    """What one row of a step is.

    Args:
        row: index into the step's tensors.
        request_id: whose row.
        token_index: absolute position over prompt plus generation.
        is_generated: whether the token at that position was generated rather than given.
        generated_index: its index among the generated tokens; None for a prompt token.
    """

    row: int
    request_id: str
    token_index: int
    is_generated: bool
    generated_index: int | None


class SeqIdMapper:
    """Knows the prompt length of each request, and how far it has come."""

    def __init__(self) -> None:
        self._prompt_len: dict[str, int] = {}
        self._generated: dict[str, int] = {}

    def register_request(self, request_id: str, prompt_len: int) -> None:
        """Take up a request before its first step.

        Args:
            request_id: as the scheduler calls it.
            prompt_len: tokens of its prompt.

        Raises:
            SeqMapperError: it is registered already, or the length is no length.
        """
        if request_id in self._prompt_len:
            raise SeqMapperError(f"request {request_id!r:.80} is registered already")
        if isinstance(prompt_len, bool) or not isinstance(prompt_len, int) or prompt_len < 1:
            raise SeqMapperError(f"request {request_id!r:.80}: a prompt of {prompt_len!r} tokens; accepted: 1 or more")
        self._prompt_len[request_id] = prompt_len
        self._generated[request_id] = 0

    def unregister_request(self, request_id: str) -> None:
        """Forget a request; an unknown one is nothing."""
        self._prompt_len.pop(request_id, None)
        self._generated.pop(request_id, None)

    def is_registered(self, request_id: str) -> bool:
        """Whether a request was taken up and not forgotten."""
        return request_id in self._prompt_len

    def prompt_len(self, request_id: str) -> int:
        """Return the tokens of a request's prompt.

        Raises:
            SeqMapperError: nobody registered it.
        """
        self._check(request_id)
        return self._prompt_len[request_id]

    def num_generated_so_far(self, request_id: str) -> int:
        """Return how many generated tokens of a request have had a row.

        Raises:
            SeqMapperError: nobody registered it.
        """
        self._check(request_id)
        return self._generated[request_id]

    def resolve_step(self, metadata: StepBatchMetadata) -> list[TokenRowMapping]:
        """Return what each row of a step is, in row order.

        Args:
            metadata: layout of the step.

        Raises:
            SeqMapperError: a row belongs to a request that nobody registered; nothing has been counted then.
        """
        for request_id in metadata.req_ids:
            self._check(request_id)
        rows: list[TokenRowMapping] = []
        counts = zip(
            metadata.req_ids,
            metadata.num_scheduled_tokens,
            metadata.num_computed_tokens_before_step,
            strict=True,
        )
        for request_id, scheduled, computed in counts:
            prompt_len = self._prompt_len[request_id]
            for position in range(computed, computed + scheduled):
                nth = position - prompt_len
                rows.append(TokenRowMapping(len(rows), request_id, position, nth >= 0, nth if nth >= 0 else None))
            generated = max(self._generated[request_id], computed + scheduled - prompt_len)
            self._generated[request_id] = generated
        return rows

    def _check(self, request_id: str) -> None:
        if request_id not in self._prompt_len:
            raise SeqMapperError(
                f"request {request_id!r:.80} is not registered: its rows cannot be told apart without its prompt length"
            )
