"""Bytes of the topics beside the activations: prompts, generations, verdicts. Uncompressed, a batch for each record."""

from __future__ import annotations

import math

from undercurrent.capacity.traffic import Traffic
from undercurrent.capacity.wire import BATCH_BYTES, USUAL, Names, around
from undercurrent.codec import Codec
from undercurrent.protocol.messages import (
    Accepted,
    BindingMode,
    GenerationEvent,
    GenerationKind,
    Message,
    Outcome,
    ProbeVerdict,
    PromptRequest,
    Sampling,
    VerdictAction,
    VerdictKind,
)

TOKEN_CHARS = 4
"""Characters of a token's text."""

_TOKEN = 50_000
_SOME_TIME_US = 1_700_000_000_000_000
_OFFSET = 100_000
_SCORE_BYTES = 4


class BesideSizes:
    """Sizes of the messages of a request that hold no activations.

    Args:
        traffic: what is served.
        names: that messages carry.
    """

    def __init__(self, traffic: Traffic, names: Names = USUAL) -> None:
        self._traffic = traffic
        self._names = names
        self._codec = Codec()

    def prompt(self) -> int:
        """Return the bytes of a prompt."""
        text = "x" * round(self._traffic.prompt_tokens * TOKEN_CHARS)
        sampling = Sampling(max_tokens=max(1, round(self._traffic.generated)))
        return self._stored(
            PromptRequest(
                request_id=self._names.request_id, prompt=text, sampling=sampling, created_at_us=_SOME_TIME_US
            )
        )

    def events(self, delta_ms: float) -> int:
        """Return the token events of a request, each of what was generated in so many milliseconds."""
        spans = self._traffic.request_s * 1000 / max(delta_ms, self._traffic.token_ms)
        return max(1, min(math.ceil(spans), math.ceil(self._traffic.generated)))

    def generation(self, delta_ms: float) -> float:
        """Return the bytes of a request's claim, token events and final."""
        events = self.events(delta_ms)
        tokens = max(1, round(self._traffic.generated / events))
        claim = Accepted(
            request_id=self._names.request_id,
            attempt=1,
            engine=self._names.engine,
            incarnation=_OFFSET,
            epoch=1,
            prompt_partition=1,
            prompt_offset=_OFFSET,
            content_hash=bytes(32),
            points=("residual",),
            stream_partition=1,
            accepted_at_us=_SOME_TIME_US,
        )
        some = self._event(GenerationKind.TOKENS, token_ids=(_TOKEN,) * tokens, text="x" * tokens * TOKEN_CHARS)
        final = self._event(GenerationKind.FINAL, outcome=Outcome.COMPLETED, finish_reason="stop")
        return self._stored(claim) + events * self._stored(some) + self._stored(final)

    def verdicts(self, rows: float, commit_ms: float = 100.0) -> float:
        """Return the bytes of a probe's words on one request: a watermark with scores each transaction, and a result.

        Args:
            rows: that it scores of the request.
            commit_ms: from one transaction of its host to the next.
        """
        count = max(1, math.ceil(self._traffic.request_s * 1000 / commit_ms))
        each = max(1, round(rows / count))
        return count * self._stored(self._verdict(VerdictKind.WATERMARK, each)) + self._stored(
            self._verdict(VerdictKind.RESULT, 0)
        )

    def _event(self, kind: GenerationKind, **fields: object) -> GenerationEvent:
        return GenerationEvent(
            request_id=self._names.request_id,
            attempt=1,
            engine=self._names.engine,
            incarnation=_OFFSET,
            kind=kind,
            first_token_index=100,
            prompt_partition=1,
            prompt_offset=_OFFSET,
            emitted_at_us=_SOME_TIME_US,
            **fields,  # type: ignore[arg-type]  # of the message
        )

    def _verdict(self, kind: VerdictKind, rows: int) -> ProbeVerdict:
        return ProbeVerdict(
            request_id=self._names.request_id,
            attempt=1,
            point="residual",
            probe="probe",
            probe_version="1",
            probe_fingerprint="0" * 64,
            service="probes",
            kind=kind,
            mode=BindingMode.SHADOW,
            action=VerdictAction.CONTINUE,
            score=1.0,
            clear_up_to=100,
            score_positions=bytes(4 * rows),
            score_layers=(1,),
            scores=bytes(_SCORE_BYTES * rows),
            scored=rows,
            source_partition=1,
            source_offset=_OFFSET,
            captured_at_us=_SOME_TIME_US,
            decided_at_us=_SOME_TIME_US,
        )

    def _stored(self, message: Message) -> int:
        value = len(self._codec.encode(message))
        return value + around(self._names.request_id_bytes, value) + BATCH_BYTES
