"""Writes a host's transaction: verdicts, dead letters and offsets, all or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from probe_consumers.inputs import Inputs
from probe_consumers.states import StatesTopic
from undercurrent.codec import Codec
from undercurrent.errors import (
    FencedError,
    StrandedError,
    TransactionError,
    UnreachableError,
)
from undercurrent.failpoints import failpoint
from undercurrent.kafka.aftermath import Aftermath, Logs
from undercurrent.kafka.records import Record
from undercurrent.kafka.transactions import Offsets, TransactionalWriter, until_decided
from undercurrent.protocol.dead_letters import Letter, Place, dead_letter
from undercurrent.protocol.host_events import DeadLetter, Transaction
from undercurrent.protocol.messages import ProbeHeartbeat

logger = logging.getLogger(__name__)


class Transactor:
    """Writes transactions with one transactional producer at a time.

    Args:
        make_writer: makes a producer; called again when one is beyond use.
        inputs: topics whose offsets are committed, and those of their dead letters.
        verdicts: topic of verdicts.
        codec: encodes verdicts.
        service: consumer group that dead letters name.
        letter_bytes: largest record that the dead-letter topic takes.
        states: topic of the states of long streams; None where none are kept.
        stable: the transactional id is a slot's: who is fenced has been replaced and must end.
        beside: a partition of no interest that the group may commit; see `aftermath`.
        deadline_s: how long a commit may stay undecided.
    """

    def __init__(
        self,
        make_writer: Callable[[], TransactionalWriter],
        inputs: Inputs,
        verdicts: str,
        codec: Codec,
        *,
        service: str,
        letter_bytes: int,
        stable: bool,
        beside: tuple[str, int],
        states: StatesTopic | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        self._make_writer = make_writer
        self._inputs = inputs
        self._verdicts = verdicts
        self._codec = codec
        self._service = service
        self._letter_bytes = letter_bytes
        self._stable = stable
        self._states = states
        self._deadline_s = deadline_s
        self._writer: TransactionalWriter | None = None
        self._aftermath = Aftermath(due=stable)
        self._beside = beside
        self._logs: Logs | None = None

    @property
    def due(self) -> bool:
        """Whether there is something to write though nobody said anything: what an earlier writer may have left."""
        return self._aftermath.due and self._logs is not None

    @property
    def other_topics(self) -> tuple[str, ...]:
        """What is written besides verdicts: dead letters and states."""
        return (*self._inputs.letters, *((self._states.name,) if self._states is not None else ()))

    def open(self) -> TransactionalWriter:
        """Return a new producer, after it freed what a dead owner of its id left open.

        Raises:
            UnreachableError: no coordinator answered in time.
        """
        writer = self._make_writer()
        writer.init(self._deadline_s)
        self._writer = writer
        return writer

    def warm_up(self, hello: ProbeHeartbeat, partitions: Iterable[int], others: Sequence[tuple[str, int]] = ()) -> None:
        """Write a first transaction to every partition of the verdicts topic.

        The first one pays for metadata, connections and registrations, 0.1-0.6 s: the loop stands still meanwhile, and
        an abort that falls into it would come that much later.

        Args:
            hello: what is written; it announces no probe.
            partitions: of the verdicts topic.
            others: partitions of `other_topics`, which an earlier writer may have left something in.

        Raises:
            FencedError: another member has this one's slot.
        """
        writer = self._writer or self.open()
        value, key = self._codec.encode(hello), hello.service.encode()
        verdicts = [(self._verdicts, number) for number in partitions]
        self._logs = Logs(partitions=(*verdicts, *others), key=key, value=value, beside=self._beside)
        try:
            writer.begin()
            for topic, partition in verdicts:
                writer.produce(topic, value, key=key, partition=partition)
            # What the slot's last owner may have left is not to be committed by this.
            self._until(writer.abort if self._aftermath.due else writer.commit)
        except TransactionError as exc:
            logger.warning("first transaction of %s: %s", self._inputs.name, exc)
            self._give_up(writer, exc)

    def write(self, transaction: Transaction, group_metadata: object) -> bool:
        """Write a transaction.

        Args:
            transaction: what the core says.
            group_metadata: the member's, as it was when the assignment was last known.

        Returns:
            False when nothing of it was written, or its fate is unknown: what it came from must be read again.

        Raises:
            FencedError: another member has this one's slot.
        """
        try:
            writer = self._writer or self.open()
        except UnreachableError as exc:
            logger.warning("%s", exc)
            return False
        try:
            if self._aftermath.due and self._logs is not None:
                self._aftermath.settle(writer, self._logs, group_metadata, self._until)
            if transaction.empty:
                return True
            self._fill(writer, transaction, group_metadata)
            self._until(writer.commit)
        except TransactionError as exc:
            logger.warning("transaction of %s: %s", self._inputs.name, exc)
            self._give_up(writer, exc)
            return False
        failpoint("committed")
        return True

    def close(self) -> None:
        """Drop what is open and end the client."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _fill(self, writer: TransactionalWriter, transaction: Transaction, group_metadata: object) -> None:
        writer.begin()
        for verdict in transaction.verdicts:
            writer.produce(self._verdicts, self._codec.encode(verdict), key=verdict.request_id.encode())
        for letter in transaction.dead_letters:
            made, number = self._letter(letter), self._inputs.place(letter.partition).number
            topic = self._inputs.letters_of(letter.partition)
            writer.produce(topic, made.value, key=made.key, partition=number, headers=made.headers)
        states = self._states
        if states is not None:
            for key, state in transaction.states.items():
                value = None if state is None else self._codec.encode(state)
                writer.produce(states.name, value, key=states.key(key), partition=states.place(key.partition).number)
        offsets: Offsets = {self._inputs.place(lane): mark for lane, mark in transaction.offsets.items()}
        if offsets:
            self._until(lambda: writer.send_offsets(offsets, group_metadata))
        failpoint("offsets_sent")

    def _until(self, call: Callable[[], None]) -> None:
        until_decided(call, self._deadline_s)

    def _give_up(self, writer: TransactionalWriter, cause: TransactionError) -> None:
        if not isinstance(cause, FencedError | StrandedError):
            try:
                self._until(writer.abort)
            except TransactionError as exc:
                cause = exc
            else:
                return
        # Beyond use. A slot's id belongs to somebody else now; a random one is ours alone, and whoever takes it over
        # ends what is open under it.
        self._writer = None
        self._aftermath.due = True
        writer.close(0.0)
        if self._stable and isinstance(cause, FencedError):
            raise cause

    def _letter(self, letter: DeadLetter) -> Letter:
        return dead_letter(
            letter.cause,
            letter.detail,
            Place(*self._inputs.place(letter.partition), letter.offset),
            letter.raw if isinstance(letter.raw, Record) else None,
            service=self._service,
            now_ms=time.time_ns() // 1_000_000,
            max_bytes=self._letter_bytes,
            to_offset=letter.to_offset,
        )
