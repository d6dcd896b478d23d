"""Ends in the logs what a broker decided about a transaction, and forgot to say there.

A broker decides, and tells the logs afterwards. One that is killed in between tells them when it is back. Apache Kafka
4.3 leaves out a log of which it knows no leader at that moment, as of every log without replicas while its only broker
starts: it takes the log for deleted. The transaction counts as ended and stays open in that log for good. Nobody who
reads what is committed gets past it, and the group's members wait for the offsets in it.

Such a log ends the open transaction with the next one of the same producer. So whoever goes on under the id has one
more transaction with all the logs that may be concerned, and aborts it: what was in the lost one is derived again,
whether it had been committed or broke off half-way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from undercurrent.errors import TopicError
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition
from undercurrent.kafka.transactions import TransactionalWriter

logger = logging.getLogger(__name__)

Until = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """The logs that may be concerned, and what does no harm there.

    Args:
        partitions: whatever is written to: outputs, dead letters, states.
        key: of a record that says nothing.
        value: of that record.
        beside: a partition that the group commits for nothing but to have its log of offsets in the transaction.
    """

    partitions: Sequence[tuple[str, int]]
    key: bytes
    value: bytes
    beside: tuple[str, int]


def partitions_of(lookup: OffsetLookup, topics: Iterable[str]) -> Iterator[Partition]:
    """Yield the partitions of topics; one that is not there has nothing that is open."""
    for topic in topics:
        with suppress(TopicError):
            yield from lookup.partitions(topic)


class Aftermath:
    """What the last writer of an id may have left.

    Args:
        due: there was one, of which nothing is known.
    """

    def __init__(self, *, due: bool) -> None:
        self.due = due

    def settle(self, writer: TransactionalWriter, logs: Logs, group_metadata: object, until: Until) -> None:
        """End what is open under the id of a new writer.

        Args:
            writer: it, without a transaction.
            logs: where.
            group_metadata: the member's.
            until: makes a call until it is decided.

        Raises:
            TransactionError: it is not known whether that was done.
        """
        writer.begin()
        for topic, partition in logs.partitions:
            writer.produce(topic, logs.value, key=logs.key, partition=partition)
        until(lambda: writer.send_offsets({logs.beside: (0, None)}, group_metadata))
        until(writer.flush)  # what a log has not got by then takes no part in the end
        until(writer.abort)
        self.due = False
        logger.info("what the last writer of %s may have left is ended", writer.transactional_id)
