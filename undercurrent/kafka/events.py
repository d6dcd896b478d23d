"""What a reader hears about a partition besides its records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from undercurrent.acls import Operation
from undercurrent.kafka import codes
from undercurrent.kafka.records import Partition

if TYPE_CHECKING:
    from confluent_kafka import Message


class PartitionProblem(StrEnum):
    """What is wrong with a partition."""

    OUT_OF_RANGE = "out_of_range"
    """The position is below the log's start or above its end; nothing is read until the owner says where to go on."""
    NOT_ALLOWED = "not_allowed"
    """The client may not read the topic."""
    MISSING = "missing"
    """The topic or the partition does not exist."""
    OTHER = "other"
    """Anything else that librdkafka does not mend by itself; `code` names it."""


@dataclass(frozen=True)
class PartitionEvent:
    """A problem of one partition; the others go on.

    Attributes:
        partition: the partition (number -1: the whole topic).
        problem: the kind.
        code: the client library's name of the error, bounded, fit for a label.
        reason: the error in words.
        position: the offset that was asked for, -1 if unknown.
    """

    partition: Partition
    problem: PartitionProblem
    code: str
    reason: str
    position: int


_KINDS = (
    (codes.OUT_OF_RANGE, PartitionProblem.OUT_OF_RANGE),
    (codes.NOT_ALLOWED, PartitionProblem.NOT_ALLOWED),
    (codes.MISSING, PartitionProblem.MISSING),
)


def event_of(message: Message, position: int) -> PartitionEvent | None:
    """Return what an error message says about a partition; None when it speaks of no topic."""
    error, topic = message.error(), message.topic()
    if error is None or topic is None:
        return None
    number = message.partition()
    return PartitionEvent(
        Partition(topic, -1 if number is None else number),
        next((kind for known, kind in _KINDS if error.code() in known), PartitionProblem.OTHER),
        error.name(),
        f"{Operation.READ} on topic {topic} is not allowed" if error.code() in codes.NOT_ALLOWED else error.str(),
        position,
    )
