"""Writes a host's transaction: verdicts, dead letters and offsets, all or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from undercurrent.codec import Codec
from undercurrent.errors import (
    FencedError,
    RetriableTransactionError,
    StrandedError,
    TransactionError,
    UnreachableError,
)
from undercurrent.kafka.records import Record
from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.protocol.dead_letters import Letter, Place, dead_letter
from undercurrent.protocol.host_events import DeadLetter, Transaction
from undercurrent.protocol.messages import ProbeHeartbeat

logger = logging.getLogger(__name__)

_AGAIN_S = 0.02


class Transactor:
    """Writes transactions with one transactional producer at a time.

    Args:
        make_writer: makes a producer; called again when one is beyond use.
        source: topic whose offsets are committed.
        verdicts: topic of verdicts.
        dead_letters: topic of dead letters.
        codec: encodes verdicts.
        letter_bytes: largest record that the dead-letter topic takes.
        stable: the transactional id is a slot's: who is fenced has been replaced and must end.
        deadline_s: how long a commit may stay undecided.
    """

    def __init__(
        self,
        make_writer: Callable[[], TransactionalWriter],
        source: str,
        verdicts: str,
        dead_letters: str,
        codec: Codec,
        *,
        letter_bytes: int,
        stable: bool,
        deadline_s: float = 30.0,
    ) -> None:
        self._make_writer = make_writer
        self._source = source
        self._verdicts = verdicts
        self._dead_letters = dead_letters
        self._codec = codec
        self._letter_bytes = letter_bytes
        self._stable = stable
        self._deadline_s = deadline_s
        self._writer: TransactionalWriter | None = None

    def open(self) -> TransactionalWriter:
        """Return a new producer, after it freed what a dead owner of its id left open.

        Raises:
            UnreachableError: no coordinator answered in time.
        """
        writer = self._make_writer()
        writer.init(self._deadline_s)
        self._writer = writer
        return writer

    def warm_up(self, hello: ProbeHeartbeat, partitions: Iterable[int]) -> None:
        """Write a first transaction to every partition of the verdicts topic.

        The first one pays for metadata, connections and registrations, 0.1-0.6 s: the loop stands still meanwhile, and
        an abort that falls into it would come that much later.

        Args:
            hello: what is written; it announces no probe.
            partitions: of the verdicts topic.

        Raises:
            FencedError: another member has this one's slot.
        """
        writer = self._writer or self.open()
        value, key = self._codec.encode(hello), hello.service.encode()
        try:
            writer.begin()
            for partition in partitions:
                writer.produce(self._verdicts, value, key=key, partition=partition)
            self._until(writer.commit)
        except TransactionError as exc:
            logger.warning("first transaction of %s: %s", self._source, exc)
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
            self._fill(writer, transaction, group_metadata)
            self._until(writer.commit)
        except TransactionError as exc:
            logger.warning("transaction of %s: %s", self._source, exc)
            self._give_up(writer, exc)
            return False
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
            made = self._letter(letter)
            writer.produce(
                self._dead_letters, made.value, key=made.key, partition=letter.partition, headers=made.headers
            )
        offsets = {(self._source, number): mark for number, mark in transaction.offsets.items()}
        if offsets:
            self._until(lambda: writer.send_offsets(offsets, group_metadata))

    def _until(self, call: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._deadline_s
        while True:
            try:
                call()
            except RetriableTransactionError as exc:
                if time.monotonic() >= deadline:
                    # Nor can it be aborted: that would only conflict with the call that is still under way.
                    raise StrandedError(f"undecided for {self._deadline_s:g} s: {exc}") from exc
                time.sleep(_AGAIN_S)  # some of these errors come at once
            else:
                return

    def _give_up(self, writer: TransactionalWriter, cause: TransactionError) -> None:
        if not isinstance(cause, FencedError | StrandedError):
            try:
                self._until(writer.abort)
            except TransactionError as exc:
                cause = exc
            else:
                return
        # Beyond use. A slot's id belongs to somebody else now; a random one was ours alone, and the broker ends what
        # is open under it by its timeout.
        self._writer = None
        writer.close(0.0)
        if self._stable and isinstance(cause, FencedError):
            raise cause

    def _letter(self, letter: DeadLetter) -> Letter:
        return dead_letter(
            letter.cause,
            letter.detail,
            Place(self._source, letter.partition, letter.offset),
            letter.raw if isinstance(letter.raw, Record) else None,
            max_bytes=self._letter_bytes,
            to_offset=letter.to_offset,
        )
