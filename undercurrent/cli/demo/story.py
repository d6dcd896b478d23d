"""What is known of each request of a demo, told by the messages on the topics alone.

Pure: messages in, facts out. The same class serves the live view, the final table and the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from undercurrent.protocol.generations import GenerationsReader, Ruling
from undercurrent.protocol.messages import (
    Accepted,
    AckOutcome,
    ControlAck,
    GenerationEvent,
    Message,
    Outcome,
    ProbeVerdict,
    Released,
    VerdictKind,
)


@dataclass(slots=True)
class Teller:
    """One request, as far as the topics have told.

    Args:
        request_id: its id.
        label: `vault` (the model would recite the code), `other`, or `yours`.
        prompt: what was asked.
        text: what was generated so far.
        tokens: how many tokens that is.
        prompt_tokens: tokens of the prompt.
        outcome: None while it runs.
        reason: why it failed, or what stopped it.
        scores: the probe's score at each token position.
        score_at_abort: the score that made the probe ask for the abort.
        abort_token_pos: the position that it stood at.
        applied_at_us: when the engine was told to stop.
        stages_ms: time from the capture to each stage of the abort.
        applied_at_token: tokens that had been generated then.
        captured_at_us: when the activation behind the abort was captured.
        guards: state of each guarding probe in the final event.
        attempt: the attempt that counts.
        judged: the probe has said its last word.
        probe_error: what the probe raised, if that was its last word.
    """

    request_id: str
    label: str
    prompt: str
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    outcome: Outcome | None = None
    reason: str = ""
    scores: dict[int, float] = field(default_factory=dict)
    score_at_abort: float | None = None
    abort_token_pos: int | None = None
    applied_at_us: int | None = None
    applied_at_token: int | None = None
    captured_at_us: int | None = None
    stages_ms: dict[str, float] = field(default_factory=dict)
    guards: dict[str, str] = field(default_factory=dict)
    attempt: int = 0
    judged: bool = False
    probe_error: str = ""

    @property
    def latest_score(self) -> float | None:
        """Return the score at the latest token that the probe has told of."""
        return self.scores[max(self.scores)] if self.scores else None

    @property
    def latency_ms(self) -> float | None:
        """Return the time from the capture of the activation that gave it away to the engine's order to stop."""
        if self.applied_at_us is None or self.captured_at_us is None:
            return None
        return (self.applied_at_us - self.captured_at_us) / 1000


class Story:
    """All requests of a demo.

    Args:
        tellers: the requests, in the order in which they are shown.
        probe: name of the probe whose verdicts count.
    """

    def __init__(self, tellers: Iterable[Teller], probe: str) -> None:
        self._tellers = {teller.request_id: teller for teller in tellers}
        self._probe = probe
        self._rules = GenerationsReader()

    def __iter__(self) -> Iterator[Teller]:
        return iter(self._tellers.values())

    def __getitem__(self, request_id: str) -> Teller:
        return self._tellers[request_id]

    @property
    def finished(self) -> bool:
        """Whether every request has its final, and every abort the acknowledgement that follows it."""
        return all(
            teller.outcome is not None and (teller.outcome is not Outcome.ABORTED or teller.applied_at_us is not None)
            for teller in self
        )

    @property
    def judged(self) -> bool:
        """Whether the probe has given its result on every request that was not refused outright."""
        return all(teller.judged or teller.outcome is Outcome.FAILED for teller in self)

    def take(self, message: Message, offset: int) -> Teller | None:
        """Take a message of any topic in, each partition in log order; return the request that it changed."""
        request_id = getattr(message, "request_id", None)
        teller = self._tellers.get(request_id) if isinstance(request_id, str) else None
        if teller is None:
            return None
        if isinstance(message, Accepted | Released | GenerationEvent):
            return self._generation(teller, message, offset)
        if isinstance(message, ProbeVerdict) and message.probe == self._probe:
            return self._verdict(teller, message)
        if isinstance(message, ControlAck):
            return self._ack(teller, message)
        return None

    def _generation(self, teller: Teller, message: Accepted | Released | GenerationEvent, offset: int) -> Teller | None:
        ruling = self._rules.apply(message, offset=offset)
        if ruling is Ruling.HOLDS:
            teller.attempt, teller.text, teller.tokens, teller.scores = message.attempt, "", 0, {}
        elif ruling is Ruling.TOKENS and isinstance(message, GenerationEvent):
            teller.text += message.text
            teller.tokens = message.first_token_index + len(message.token_ids)
        elif ruling is Ruling.CLOSED and isinstance(message, GenerationEvent):
            self._final(teller, message)
        else:
            return None
        return teller

    @staticmethod
    def _final(teller: Teller, event: GenerationEvent) -> None:
        teller.text += event.text
        teller.tokens = event.generated_tokens
        teller.prompt_tokens = event.prompt_tokens
        teller.outcome = event.outcome
        teller.guards = {guard.probe: guard.state.value for guard in event.guards}
        teller.reason = event.error or (event.abort.reason if event.abort else "") or event.finish_reason or ""
        if event.abort is not None:
            teller.score_at_abort = event.abort.score
            teller.abort_token_pos = event.abort.token_pos

    @staticmethod
    def _verdict(teller: Teller, verdict: ProbeVerdict) -> Teller | None:
        if verdict.attempt < teller.attempt:
            return None
        if verdict.kind in (VerdictKind.RESULT, VerdictKind.ERROR):
            teller.judged, teller.probe_error = True, verdict.error or teller.probe_error
        positions = np.frombuffer(verdict.score_positions, dtype="<i4")
        values = np.frombuffer(verdict.scores, dtype="<f4")
        if positions.size:
            # Several layers give several scores at a position; the highest is shown. NaN: not scored.
            highest = np.fmax.reduce(values.reshape(positions.size, -1), axis=1)
            teller.scores.update((p, s) for p, s in zip(positions.tolist(), highest.tolist(), strict=True) if s == s)
        return teller

    @staticmethod
    def _ack(teller: Teller, ack: ControlAck) -> Teller | None:
        if ack.outcome is not AckOutcome.APPLIED or teller.applied_at_us is not None:
            return None
        teller.applied_at_us = ack.applied_at_us
        teller.applied_at_token = ack.token_index
        teller.captured_at_us = ack.captured_at_us
        if ack.captured_at_us is not None:
            times = {
                "published": ack.published_at_us,
                "decided": ack.decided_at_us,
                "received": ack.received_at_us,
                "applied": ack.applied_at_us,
            }
            since = ack.captured_at_us
            teller.stages_ms = {name: (at_us - since) / 1000 for name, at_us in times.items() if at_us is not None}
        return teller
