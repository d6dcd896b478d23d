"""What goes into the engine worker's protocol and what comes out of it: prompts, limits, and actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from undercurrent.protocol.generations import RequestState
from undercurrent.protocol.messages import (
    Accepted,
    ControlAck,
    GenerationEvent,
    PromptRequest,
    Released,
)

MAX_ERROR_CHARS = 2000


class Now(NamedTuple):
    """The time of an event.

    Args:
        mono_s: monotonic clock, seconds; what durations are measured with.
        wall_us: microseconds since the Unix epoch; what messages carry.
    """

    mono_s: float
    wall_us: int


class RunKey(NamedTuple):
    """One attempt of one request in this worker."""

    request_id: str
    attempt: int


class StreamKey(NamedTuple):
    """One stream of a run: one child at one point."""

    child: int
    point: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """Why a prompt cannot run, whoever runs it.

    Args:
        kind: finish reason of its failed final: bad_request or undecodable.
        error: what is wrong and what would be right; longer than `MAX_ERROR_CHARS` it is cut.
    """

    kind: str
    error: str

    def __post_init__(self) -> None:
        # An error often repeats what its prompt says; a final that no topic takes would end every worker that tries.
        if len(self.error) > MAX_ERROR_CHARS:
            object.__setattr__(self, "error", self.error[: MAX_ERROR_CHARS - 4] + " ...")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as the protocol sees it.

    Args:
        request_id: its id; where the bytes cannot be decoded, the record's key.
        offset: its offset.
        content_hash: SHA-256 of its body.
        points: extraction points that it opens streams on.
        stream_partition: partition of those streams.
        n: number of children.
        deadline_us: not started after this time.
        defect: why it cannot run.
        request: the decoded request, handed on to the engine.
        source: the record it came in, handed on to the dead-letter topic.
    """

    request_id: str
    offset: int
    content_hash: bytes
    points: tuple[str, ...] = ()
    stream_partition: int = 0
    n: int = 1
    deadline_us: int | None = None
    defect: Defect | None = None
    request: PromptRequest | None = None
    source: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Bounds and patience of a worker.

    Args:
        max_in_flight: requests that the engine works on at once.
        max_waiting: prompts of one partition that wait in memory before its intake pauses; of those that wait for a
            guard, four times as many more.
        handover_s: how long in-flight requests may go on after their partition was revoked.
        shutdown_s: how long they may go on after a stop was asked for.
        stream_end_timeout_s: how long to wait for a stream's end before it is declared lost.
        unopened_timeout_s: the same for a request that was stopped before its first token: it may have no stream.
        guard_wait_s: how long a final waits for the guards' verdicts.
        pause_s: a loop that stood still longer has to prove that it still belongs to its group.
        commit_interval_s: least time between two commits of a partition.
        proof_retry_s: after how long an unanswered commit is tried again.
        dedupe_window_s: how long a finished prompt is remembered at least, so that a repeated id is found.
        control_keep_s: how long commands and their answers are remembered: the retention of the control topic.
    """

    max_in_flight: int = 64
    max_waiting: int = 256
    handover_s: float = 5.0
    shutdown_s: float = 20.0
    stream_end_timeout_s: float = 10.0
    unopened_timeout_s: float = 1.0
    guard_wait_s: float = 1.0
    pause_s: float = 1.5
    commit_interval_s: float = 0.5
    proof_retry_s: float = 5.0
    dedupe_window_s: float = 3600.0
    control_keep_s: float = 86_400.0


@dataclass(frozen=True, slots=True)
class Publish:
    """Write a message to the generations partition; what counts is that it is read back from there."""

    partition: int
    message: Accepted | Released | GenerationEvent


@dataclass(frozen=True, slots=True)
class Purge:
    """Take back what was to be published to a partition and has not left yet: another worker may own it already."""

    partition: int


@dataclass(frozen=True, slots=True)
class Start:
    """Give a request to the engine. Answers: `delta` for each child, or `rejected`.

    Args:
        partition: of the prompt.
        key: the run.
        prompt: what to run.
        after: why it is begun anew: its last worker `released` it, or one was `lost` with it; None for the first time.
        alone: nothing else is in the engine meanwhile.
    """

    partition: int
    key: RunKey
    prompt: Prompt
    after: str | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True)
class AbortEngine:
    """Stop a request, or one child of it, in the engine now."""

    key: RunKey
    index: int | None = None


@dataclass(frozen=True, slots=True)
class EndStreams:
    """Write a `lost` StreamEnded for each of these streams. Answer: `streams_lost`, once they are acknowledged.

    Args:
        key: the run that waits for it.
        holder: the attempt whose streams they are: an earlier worker's, or this run's own.
        streams: which.
        detail: why, in words.
    """

    key: RunKey
    holder: RequestState
    streams: tuple[StreamKey, ...]
    detail: str

    @property
    def token(self) -> str:
        """What the run waits for until it is answered."""
        return f"streams of {self.holder.attempt}"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Write a prompt to the dead-letter topic. Answer: `dead_lettered`, once it is acknowledged."""

    partition: int
    offset: int
    source: object
    kind: str
    error: str


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Write an acknowledgement of a control command. Answer: `ack_delivered`."""

    ack: ControlAck


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit a position. Answer: `committed`, with the serial."""

    partition: int
    offset: int
    metadata: str
    serial: int


@dataclass(frozen=True, slots=True)
class Tail:
    """Read a generations partition from this offset on. Answers: `generation` for each record, `caught_up` once.

    The answers carry this epoch, also when records of an earlier `Tail` of the partition are still under way.
    """

    partition: int
    epoch: int
    offset: int


@dataclass(frozen=True, slots=True)
class Untail:
    """Stop reading a generations partition."""

    partition: int


@dataclass(frozen=True, slots=True)
class Reacquire:
    """Another owner with a higher epoch has written here: take an epoch of at least this one, as when assigned."""

    partition: int
    at_least: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Nothing of a revoked partition is in flight any more; it may go."""

    partition: int


@dataclass(frozen=True, slots=True)
class ReadControl:
    """Read the control topic to its present end. Answer: `control_at_end`."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop that was asked for is complete."""


Action = (
    Publish
    | Purge
    | Start
    | AbortEngine
    | EndStreams
    | DeadLetter
    | Acknowledge
    | Commit
    | Tail
    | Untail
    | Reacquire
    | HandedOver
    | ReadControl
    | Stopped
)
"""What the worker's edge has to do, in the order given."""
