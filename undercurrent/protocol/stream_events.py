"""What happens to the streams of one activations partition: what a table says of a record, and what probes are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from undercurrent.protocol.messages import (
    ActivationBlock,
    Message,
    StreamStarted,
)
from undercurrent.protocol.open_stream import Fault, Stream
from undercurrent.protocol.strands import Strand


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream opens.

    Args:
        stream: the new stream.
        message: what opened it.
        layers: layers of the whole stream, None while a shard has not started.
    """

    stream: Stream
    message: StreamStarted
    layers: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Joined:
    """A further shard of an open stream has started.

    Args:
        stream: its stream.
        message: what started it.
        layers: layers of the whole stream, None while a shard has not started.
    """

    stream: Stream
    message: StreamStarted
    layers: tuple[int, ...] | None


class Arrived(NamedTuple):
    """Rows of an open stream, with the layers of all its shards.

    Args:
        stream: its stream.
        block: the activations.
        gap: messages of the shard whose record released them that never came, directly before that record.
        clear_up_to: the stream's clear mark after this block; the stream itself moves on within a batch.
    """

    stream: Stream
    block: ActivationBlock
    gap: int
    clear_up_to: int


class ArrivedStrand(NamedTuple):
    """Many times `Arrived`, in order, without a gap.

    Args:
        stream: their stream.
        strand: the blocks.
        clear_up_to: the stream's clear mark after each.
    """

    stream: Stream
    strand: Strand
    clear_up_to: Sequence[int]


@dataclass(frozen=True, slots=True)
class Closed:
    """A stream closes; `stream.end_reason` says why."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Limited:
    """So much of its partition has come since a stream opened that only states that can be written down go on."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Withheld:
    """What a quarantined record would have brought about: the probes of its stream see neither it nor more.

    Args:
        stream: its stream.
        event: what it is to the stream.
        said_from: offset from which on the probes' failure is said.
        place: of the record, in words, where the step's own offset is another one.
    """

    stream: Stream
    event: Opened | Joined | Arrived | Closed
    said_from: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class Noted:
    """A record that is no step of a stream by itself, for whoever looks at more than one partition.

    Args:
        message: what it says, None where nobody can read it.
        stream: the open stream that it names, if there is one.
        faults: what was wrong with that stream after it.
        clear_up_to: that stream's clear mark after it.
    """

    message: Message | None
    stream: Stream | None = None
    faults: tuple[Fault, ...] = ()
    clear_up_to: int = -1


@dataclass(frozen=True, slots=True)
class Stray:
    """A record that belongs to no open stream.

    Args:
        cause: a bounded word: no_open_stream, stale_attempt, stale_revision, repeated_start, repeated, conflict,
            foreign, malformed, after_end, wrong_point, wrong_message.
    """

    cause: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """A record that changes nothing and is no fault: a StreamEnded of a closed stream, a PublisherStarted."""


StreamEvent = Opened | Joined | Arrived | Closed | Stray | Nothing
"""What a table says of a record."""

StepEvent = Opened | Joined | Arrived | ArrivedStrand | Closed | Limited | Withheld | Noted
"""What a host tells the probes of."""
