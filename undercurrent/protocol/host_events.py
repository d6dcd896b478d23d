"""What goes into a probe host's core and what comes out: records and steps, outputs and actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from undercurrent.protocol.host_position import Declaration
from undercurrent.protocol.messages import ControlCommand, Message, ProbeState, ProbeVerdict, RunState
from undercurrent.protocol.streams import StepEvent, Stream, StreamId


# One for each record: a named tuple is made in a quarter of the time that a frozen dataclass takes.
class Incoming(NamedTuple):
    """One record of an activations topic, decoded.

    Args:
        partition: where it was read.
        offset: where in the partition.
        timestamp_us: when the broker appended it, microseconds since the Unix epoch.
        message: what it says, None when it cannot be read.
        error: why it cannot be read.
        raw: the record as it came, for the dead-letter topic; opaque here.
        size: bytes of its value.
        before: bytes of what was left out on purpose since the record before it.
    """

    partition: int
    offset: int
    timestamp_us: int
    message: Message | None
    error: str = ""
    raw: object = None
    size: int = 0
    before: int = 0


class Step(NamedTuple):
    """Something that happens to a stream, on its way to the probes.

    Args:
        partition: of the record that it follows from.
        offset: of that record; of many, of the first in their stretch.
        timestamp_us: when the broker appended that record; of many, the last in their stretch.
        event: Opened, Joined, Arrived, ArrivedStrand, Closed, Limited or Withheld; or Noted,
            where a runner wants it.
        silent: its outputs are written already; it only rebuilds state.
        others: of a joined stream, the offsets of the other points' records that it follows from, in their order.
    """

    partition: int
    offset: int
    timestamp_us: int
    event: StepEvent
    silent: bool
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What the probes say because of a step.

    Args:
        verdict: for the verdicts topic; names the record that it follows from.
        command: the abort that goes with it.
        timestamp_us: when the broker appended the record that it follows from.
        silent: it is written already; what said it only rebuilt its state.
    """

    verdict: ProbeVerdict
    command: ControlCommand | None = None
    timestamp_us: int = 0
    silent: bool = False

    def without_abort(self, why: str) -> Emission:
        """Return it without its abort, and with a word on why."""
        metadata = {**self.verdict.metadata, "abort": why}
        return replace(self, verdict=replace(self.verdict, command_id=None, metadata=metadata), command=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that no stream takes, or a declared loss.

    Args:
        partition: of the source.
        offset: of the source record; of the first lost one for a declared loss.
        cause: a bounded word.
        detail: in words.
        raw: the record as it came, None for a declared loss.
        stream: whose record it is, None where it cannot be read or is of no stream.
        to_offset: of a declared loss, the offset after the last record that is gone.
    """

    partition: int
    offset: int
    cause: str
    detail: str = ""
    raw: object = None
    stream: StreamId | None = None
    to_offset: int | None = None


class StateKey(NamedTuple):
    """Whose state it is, among those of one service at one point.

    Args:
        partition: of the stream.
        stream: the stream.
    """

    partition: int
    stream: StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """What has to be written at once or not at all.

    Args:
        verdicts: in order, per stream.
        dead_letters: in order, per partition.
        offsets: (offset, metadata) to commit, by partition.
        states: of long streams; None for one that is needed no more.
    """

    verdicts: tuple[ProbeVerdict, ...]
    dead_letters: tuple[DeadLetter, ...]
    offsets: Mapping[int, tuple[int, str]]
    states: Mapping[StateKey, ProbeState | None] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.verdicts or self.dead_letters or self.offsets or self.states)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask for the committed offset and the bounds of a partition, paused meanwhile; answer with `begin`."""

    partition: int


@dataclass(frozen=True, slots=True)
class Declare:
    """Log and count something about a partition's position."""

    partition: int
    declaration: Declaration


@dataclass(frozen=True, slots=True)
class Commit:
    """Run a transaction now; the actions after it hold only if it succeeds."""


@dataclass(frozen=True, slots=True)
class Read:
    """Seek a partition to an offset and let it flow."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Send an abort command at once; it must be delivered before the next transaction commits."""

    command: ControlCommand


Action = Fetch | Declare | Commit | Read | SendAbort


class StreamRunner(Protocol):
    """Runs the probes on what happens to the streams. Its state must follow from the steps alone."""

    def process(self, steps: Sequence[Step]) -> Iterable[Emission]:
        """Take the steps of one batch in order and return what the probes say, in the order of the steps."""
        ...

    def watermarks(self, partition: int) -> Iterable[ProbeVerdict]:
        """Return, and forget, the scores of open streams that no verdict has carried yet."""
        ...

    def forget(self, partition: int) -> None:
        """Drop all state of a partition."""
        ...

    def states(self, partition: int, stream: Stream) -> tuple[RunState, ...] | None:
        """Return how far the probes of an open stream have come; None where one of them cannot say.

        What they have said has been taken by `watermarks`. Asked for only where states are kept.
        """
        ...

    def restore(self, partition: int, stream: Stream, runs: Sequence[RunState], said_from: int) -> bool:
        """Take an open stream up from what `states` returned; return False where a probe could not.

        Such a probe has failed, which is said from offset `said_from` on. Called only where states are kept.
        """
        ...
