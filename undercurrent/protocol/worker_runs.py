"""One attempt of one request in a worker, from its claim to its finals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from undercurrent.protocol.control import MAX_REASON_CHARS, Command
from undercurrent.protocol.generations import RequestState
from undercurrent.protocol.messages import (
    AbortCause,
    Accepted,
    CommandKind,
    CommandSource,
    ControlCommand,
    GenerationEvent,
    GenerationKind,
    Guard,
    Holdout,
    Outcome,
    Released,
    ReleaseReason,
)
from undercurrent.protocol.worker_types import Defect, Now, Prompt, RunKey, StreamKey

DEADLINE = "deadline"
ABORT = "abort"
ENGINE_LOST = "engine_lost"


class Phase(Enum):
    """How far a run has come."""

    CLAIMED = auto()
    """Its Accepted is written, not yet read back."""
    RUNNING = auto()
    """The engine has it."""
    SETTLING = auto()
    """It will never run, or no longer runs: stream ends, guards and finals are left."""


@dataclass(slots=True)
class Child:
    """One child of a run.

    Args:
        finish_reason: what the engine said at its end.
        stopped_at_s: when it said so, monotonic.
        generated_tokens: tokens so far.
        prompt_tokens: tokens of the prompt.
        cached_tokens: of them from a prefix cache.
        first_token_at_us: when the first token came.
        open_streams: points whose stream's end is not acknowledged yet.
        guards_from_s: since when its final waits for guards.
        written: its final is written.
    """

    open_streams: set[str]
    finish_reason: str | None = None
    stopped_at_s: float = 0.0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_at_us: int | None = None
    guards_from_s: float | None = None
    written: bool = False

    def count(self, generated: int, prompt_tokens: int, cached_tokens: int, now: Now) -> None:
        """Note what the engine says of it."""
        self.generated_tokens = generated
        self.prompt_tokens = prompt_tokens or self.prompt_tokens
        self.cached_tokens = cached_tokens or self.cached_tokens
        if generated and self.first_token_at_us is None:
            self.first_token_at_us = now.wall_us


@dataclass(slots=True)
class Abort:
    """A command that stops a run or one of its children.

    Args:
        command: it.
        received_at_us: when the worker read it.
        applied_at_us: when the engine had stopped.
    """

    command: ControlCommand
    received_at_us: int
    applied_at_us: int | None = None

    @property
    def cause(self) -> AbortCause:
        """What the final says of it."""
        return AbortCause(
            command_id=self.command.command_id,
            source=self.command.source,
            probe=self.command.probe,
            token_pos=self.command.token_pos,
            score=self.command.score,
            reason=self.command.reason[:MAX_REASON_CHARS],
        )


def own_abort(request_id: str, reason: str, now: Now) -> Abort:
    """Return the abort of a request that the worker decides by itself; there is no command of it on any topic."""
    command = ControlCommand(
        command_id="",
        kind=CommandKind.ABORT,
        request_id=request_id,
        source=CommandSource.ENGINE,
        reason=reason,
        issued_at_us=now.wall_us,
    )
    return Abort(command, now.wall_us)


@dataclass(slots=True, kw_only=True)
class Run:
    """One attempt of one request.

    Args:
        prompt: what to run.
        accepted: the claim as it was written.
        slot: it may run, so it counts against the engine's slots; the others are only finished.
        defect: why it cannot run.
        expired: its deadline has passed.
        alone: engines have ended while they ran it: nothing else may be in this one meanwhile.
        holdout: whether no probe stops it; None where none is held out.
        aborts: the commands that stop it: all of it under None, one child alone under its index.
        late: further commands for this attempt; they are answered when its final was read.
        previous: other workers' attempts before, whose streams may still be open.
        children: state of each child that has no valid final yet.
        awaiting: what a final has to wait for: `previous` streams to be looked at, `dead_letter`, `streams`.
        acks: commands whose acknowledgement is not delivered yet.
        ran: the engine had it.
        holder: the claim as it was read back.
    """

    prompt: Prompt
    accepted: Accepted
    slot: bool
    phase: Phase = Phase.CLAIMED
    defect: Defect | None = None
    expired: bool = False
    alone: bool = False
    holdout: Holdout | None = None
    aborts: dict[int | None, Abort] = field(default_factory=dict)
    late: list[Command] = field(default_factory=list)
    previous: tuple[RequestState, ...] = ()
    children: dict[int, Child] = field(default_factory=dict)
    awaiting: set[str] = field(default_factory=set)
    acks: set[str] = field(default_factory=set)
    ran: bool = False
    holder: RequestState | None = None

    @property
    def key(self) -> RunKey:
        """Name of this run."""
        return RunKey(self.prompt.request_id, self.accepted.attempt)

    @property
    def commands(self) -> list[Command]:
        """The commands that stop it and want an answer: what the worker decides by itself wants none."""
        return [
            Command(abort.command, abort.received_at_us)
            for abort in self.aborts.values()
            if abort.command.source is not CommandSource.ENGINE
        ]

    def abort_of(self, index: int) -> Abort | None:
        """Return the command that stops a child."""
        return self.aborts.get(index) or self.aborts.get(None)

    @property
    def aborted(self) -> bool:
        """Some command stops every child that is open."""
        return bool(self.children) and all(self.abort_of(index) is not None for index in self.children)

    @property
    def stopped(self) -> bool:
        """The engine is done with every child."""
        return bool(self.children) and all(child.finish_reason is not None for child in self.children.values())

    @property
    def partly_stopped(self) -> bool:
        """The engine is done with some child."""
        return any(child.finish_reason is not None for child in self.children.values())

    @property
    def written(self) -> bool:
        """Every final is written, though perhaps not read back."""
        return bool(self.children) and all(child.written for child in self.children.values())

    def streams_ended(self, streams: Iterable[StreamKey]) -> None:
        """Note streams whose end is acknowledged."""
        for stream in streams:
            child = self.children.get(stream.child)
            if child is not None:
                child.open_streams.discard(stream.point)

    def final(self, index: int, guards: tuple[Guard, ...], now: Now) -> GenerationEvent:
        """Return the final of a child."""
        child = self.children[index]
        abort = self.abort_of(index)
        outcome, reason, error = self._outcome(child, abort)
        return GenerationEvent(
            request_id=self.prompt.request_id,
            attempt=self.accepted.attempt,
            index=index,
            engine=self.accepted.engine,
            incarnation=self.accepted.incarnation,
            kind=GenerationKind.FINAL,
            first_token_index=child.generated_tokens,
            prompt_partition=self.accepted.prompt_partition,
            prompt_offset=self.accepted.prompt_offset,
            outcome=outcome,
            finish_reason=reason,
            error=error,
            abort=abort.cause if abort is not None and outcome is Outcome.ABORTED else None,
            prompt_tokens=child.prompt_tokens,
            cached_tokens=child.cached_tokens,
            generated_tokens=child.generated_tokens,
            guards=guards,
            holdout=self.holdout,
            first_token_at_us=child.first_token_at_us,
            emitted_at_us=now.wall_us,
        )

    def _outcome(self, child: Child, abort: Abort | None) -> tuple[Outcome, str, str | None]:
        if child.finish_reason not in (None, ABORT):
            return Outcome.COMPLETED, str(child.finish_reason), None
        if abort is not None:
            return Outcome.ABORTED, ABORT, None
        if self.defect is not None:
            return Outcome.FAILED, self.defect.kind, self.defect.error
        if self.expired:
            return Outcome.FAILED, DEADLINE, "its deadline had passed before it could start"
        return Outcome.FAILED, "engine_stopped", "the engine stopped it and nobody had asked for that"

    def released(self, reason: ReleaseReason, now: Now) -> Released:
        """Return the record that gives this run up."""
        return Released(
            request_id=self.prompt.request_id,
            attempt=self.accepted.attempt,
            engine=self.accepted.engine,
            incarnation=self.accepted.incarnation,
            prompt_partition=self.accepted.prompt_partition,
            prompt_offset=self.accepted.prompt_offset,
            reason=reason,
            released_at_us=now.wall_us,
        )
