"""A record of requests as a healthy pipeline writes it, to plant faults in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.unit import messages
from undercurrent.protocol.audit import Audit, Finding, Heard
from undercurrent.protocol.dead_letters import Place
from undercurrent.protocol.messages import (
    AbortCause,
    AckOutcome,
    BindingMode,
    BoundProbe,
    CommandKind,
    CommandSource,
    ControlAck,
    ControlCommand,
    EndReason,
    GenerationEvent,
    GenerationKind,
    Guard,
    GuardState,
    Message,
    Outcome,
    ProbeHeartbeat,
    ProbeVerdict,
    PromptRequest,
    Released,
    ReleaseReason,
    Sampling,
    VerdictAction,
    VerdictKind,
)
from undercurrent.testing.streams import StreamBuilder
from undercurrent.topics import partition_of

PARTITIONS = 2
POINT = "residual"
Log = tuple[str, int]


class RecordWorld:
    """Logs of every topic, by (topic, partition); `at_ms` grows with every record."""

    def __init__(self) -> None:
        self.logs: dict[Log, list[Heard]] = defaultdict(list)
        self._now_ms = 0

    # --- one record

    def add(self, topic: str, partition: int, key: str, message: Message | None, source: Place | None = None) -> int:
        log = self.logs[f"t.{topic}", partition]
        self._now_ms += 1
        log.append(Heard(f"t.{topic}", partition, len(log), self._now_ms, key, message, source))
        return len(log) - 1

    def prompt(self, request_id: str, **fields: Any) -> int:
        message = PromptRequest(request_id=request_id, prompt="p", sampling=Sampling(), created_at_us=0, **fields)
        return self.add("prompts", self.home(request_id), request_id, message)

    def accept(self, request_id: str, offset: int, attempt: int = 1, **fields: Any) -> None:
        place = {"prompt_partition": self.home(request_id), "prompt_offset": offset}
        message = messages.accepted(request_id, attempt, **{"points": (POINT,), **place, **fields})
        self.add("generations", self.home(request_id), request_id, message)

    def release(self, request_id: str, offset: int, attempt: int = 1) -> None:
        message = Released(
            request_id=request_id,
            attempt=attempt,
            engine="e",
            incarnation=attempt,
            prompt_partition=self.home(request_id),
            prompt_offset=offset,
            reason=ReleaseReason.HANDED_OVER,
            released_at_us=0,
        )
        self.add("generations", self.home(request_id), request_id, message)

    def event(self, request_id: str, offset: int, kind: GenerationKind, attempt: int = 1, **fields: Any) -> None:
        place = {"prompt_partition": self.home(request_id), "prompt_offset": offset}
        message = messages.event(request_id, attempt, kind=kind, **{**place, **fields})
        self.add("generations", self.home(request_id), request_id, message)

    def final(self, request_id: str, offset: int, attempt: int = 1, *, tokens: int = 2, **fields: Any) -> None:
        known = {"outcome": Outcome.COMPLETED, "generated_tokens": tokens, **fields}
        self.event(request_id, offset, GenerationKind.FINAL, attempt, **known)

    def verdict(self, request_id: str, kind: VerdictKind = VerdictKind.RESULT, attempt: int = 1, **fields: Any) -> None:
        known: dict[str, Any] = {
            "point": POINT,
            "probe": "guard",
            "service": "probes",
            "mode": BindingMode.SHADOW,
            "action": VerdictAction.CONTINUE,
            "source_partition": self.home(request_id),
            "source_offset": 9,
            "decided_at_us": 0,
        }
        message = ProbeVerdict(request_id=request_id, attempt=attempt, kind=kind, **{**known, **fields})
        self.add("verdicts", self.home(request_id), request_id, message)

    def command(self, request_id: str, command_id: str = "c", **fields: Any) -> None:
        known: dict[str, Any] = {"kind": CommandKind.ABORT, "source": CommandSource.OPERATOR, "issued_at_us": 0}
        message = ControlCommand(command_id=command_id, request_id=request_id, **{**known, **fields})
        self.add("control", 0, request_id, message)

    def ack(self, request_id: str, outcome: AckOutcome, command_id: str = "c") -> None:
        message = ControlAck(
            command_id=command_id,
            request_id=request_id,
            engine="e",
            incarnation=1,
            outcome=outcome,
            received_at_us=0,
        )
        self.add("control.acks", 0, request_id, message)

    def letter(self, topic: str, partition: int, offset: int) -> None:
        self.add(f"{topic}.dlq", partition, "", None, Place(f"t.{topic}", partition, offset))

    # --- several

    def stream(self, request_id: str, attempt: int = 1, *, tokens: int = 3, **fields: Any) -> None:
        """A whole stream with its result."""
        stream = self.open_stream(request_id, attempt, tokens=tokens, **fields)
        self.activation(request_id, stream.ended())
        self.verdict(request_id, attempt=attempt, index=fields.get("index", 0))

    def open_stream(self, request_id: str, attempt: int = 1, *, tokens: int = 3, **fields: Any) -> StreamBuilder:
        stream = StreamBuilder(request_id, attempt=attempt, engine="e", incarnation=attempt, **fields)
        self.activation(request_id, stream.started())
        for position in range(tokens):
            self.activation(request_id, stream.activations([position], [[0.0] * 4]))
        return stream

    def activation(self, request_id: str, message: Message | None) -> int:
        point = getattr(message, "point", POINT)
        return self.add(f"activations.{point}", self.home(request_id), request_id, message)

    def heartbeat(self, *points: str) -> None:
        """A probe host that reads these, alone or joined, says so."""
        probes = tuple(BoundProbe(probe=f"on-{point}", point=point, mode=BindingMode.SHADOW) for point in points)
        message = ProbeHeartbeat(service="probes", member="m", probes=probes, partitions=(0, 1), sent_at_us=0)
        self.add("verdicts", 0, "probes", message)

    def joined(self, request_id: str, points: tuple[str, ...], *, said: bool = True, **result: Any) -> None:
        """A request that ran once with a stream at each of some points, and what a probe said that joins them."""
        offset = self.prompt(request_id)
        self.accept(request_id, offset, points=points)
        for point in points:
            self.activation(request_id, self.open_stream(request_id, point=point).ended())
        self.tokens(request_id, offset)
        self.final(request_id, offset)
        if said:
            self.verdict(request_id, probe="both", point="residual+attn", **result)

    def tokens(self, request_id: str, offset: int, attempt: int = 1, *, count: int = 2, **fields: Any) -> None:
        for at in range(count):
            known = {"first_token_index": at, "token_ids": (7,), "text": "x", **fields}
            self.event(request_id, offset, GenerationKind.TOKENS, attempt, **known)

    def completed(self, request_id: str, **final: Any) -> int:
        """A request that ran once, with a stream, a result and its final."""
        offset = self.prompt(request_id)
        self.accept(request_id, offset)
        self.stream(request_id)
        self.tokens(request_id, offset)
        self.final(request_id, offset, **final)
        return offset

    def handed_over(self, request_id: str, *, duplicate: bool = False) -> None:
        """A request whose first worker gave it up and whose second ended it; the first one's stream was superseded."""
        offset = self.prompt(request_id)
        self.accept(request_id, offset)
        self.open_stream(request_id)
        self.tokens(request_id, offset, count=1)
        self.release(request_id, offset)
        if duplicate:
            again = self.prompt(request_id)
            self.event(request_id, again, GenerationKind.DUPLICATE)
        self.accept(request_id, offset, 3)
        self.stream(request_id, 3)
        self.verdict(request_id, complete=False, end_reason="superseded")
        self.tokens(request_id, offset, 3)
        self.final(request_id, offset, 1)  # a zombie's
        self.final(request_id, offset, 3)

    def aborted(self, request_id: str, command_id: str = "c", outcome: AckOutcome = AckOutcome.APPLIED) -> None:
        """A request that a command stopped."""
        offset = self.prompt(request_id)
        self.command(request_id, command_id)
        self.accept(request_id, offset)
        self.stream(request_id)
        self.tokens(request_id, offset)
        self.final(request_id, offset, outcome=Outcome.ABORTED, abort=cause(command_id))
        self.ack(request_id, outcome, command_id)

    def poison(self, request_id: str) -> None:
        """A prompt that nobody can decode: dead-lettered, and ended as failed."""
        offset = self.add("prompts", self.home(request_id), request_id, None)
        self.accept(request_id, offset, points=())
        self.letter("prompts", self.home(request_id), offset)
        self.final(request_id, offset, outcome=Outcome.FAILED, tokens=0)

    # --- what an audit says

    def home(self, request_id: str) -> int:
        return partition_of(request_id, PARTITIONS)

    def change(
        self, topic: str, wanted: Callable[[Message], bool], change: Callable[[Message], Message | None]
    ) -> None:
        """Change, or with None remove, the first record of a topic that is wanted."""
        for (name, _), log in self.logs.items():
            for at, heard in enumerate(log):
                if name == f"t.{topic}" and heard.message is not None and wanted(heard.message):
                    changed = change(heard.message)
                    log[at : at + 1] = [] if changed is None else [heard._replace(message=changed)]
                    return
        raise AssertionError(f"no such record on {topic}")

    def in_order(self) -> Iterator[Heard]:
        """Every record, as they were written."""
        return iter(sorted((heard for log in self.logs.values() for heard in log), key=lambda heard: heard.at_ms))

    def audit(self, **options: Any) -> Audit:
        audit = Audit("t", **{"whole": True, **options})
        for heard in self.in_order():
            audit.take(heard)
        return audit

    def findings(self, **options: Any) -> list[Finding]:
        return list(self.audit(**options).findings())

    def kinds(self, **options: Any) -> list[str]:
        return [finding.kind.value for finding in self.findings(**options)]


def cause(command_id: str) -> AbortCause:
    return AbortCause(command_id=command_id, source=CommandSource.OPERATOR)


def is_final(message: Message) -> bool:
    return isinstance(message, GenerationEvent) and message.kind is GenerationKind.FINAL


def guarded(probe: str = "guard") -> tuple[Guard, ...]:
    return (Guard(probe=probe, clear_up_to=3, state=GuardState.COMPLETE),)


def lost(message: Any) -> Message:
    return replace(message, reason=EndReason.LOST, seq=0, emitted=(), dropped=())
