"""Aborts by an operator: commands out, what became of them back.

    with Aborter(settings) as aborter:
        command = aborter.send("r-1", reason="the customer asked for it")
        for ack in aborter.answers([command], timeout_s=30.0):
            ...

A command names no attempt: it stops the request now, in every later attempt, and before it has started. It stands on
the control topic whatever becomes of who wrote it; the first answer in log order counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from producer.connection import FETCH_RECORDS, POLL_S, Client
from producer.prompts import new_request_id
from undercurrent.errors import ConfigError, DecodeError, ProbingError, TopicError, UnreachableError
from undercurrent.kafka.publisher import Delivery
from undercurrent.kafka.records import Partition
from undercurrent.protocol.control import MAX_REASON_CHARS
from undercurrent.protocol.messages import AckOutcome, CommandKind, CommandSource, ControlAck, ControlCommand


class AbortError(ProbingError):
    """A command did not reach the control topic.

    Args:
        request_id: the request that it names.
        reason: what the client or the broker said.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        self.request_id = request_id
        super().__init__(f"abort of {request_id}: {reason}")


class Aborter(Client):
    """Writes an operator's commands and hears the answers. One thread uses it; see `Client` for its arguments.

    Raises:
        TopicError: a control topic is missing, or is none of one partition.
        UnreachableError: no broker answers.
    """

    def _begin(self) -> None:
        self._control, self._acks = Partition(self._topics.control, 0), Partition(self._topics.acks, 0)
        for where in (self._control, self._acks):
            found = len(self._connection.lookup.partitions(where.topic))
            if found != 1:
                raise TopicError(f"{where.topic} has {found} partitions; commands have one order only where it is 1")
        # An answer is always written after its command: whoever reads from here misses none.
        self._start = self._connection.lookup.end([self._acks])[self._acks]

    def send(self, request_id: str, *, reason: str, index: int | None = None) -> ControlCommand:
        """Command the end of a request; return the command when the broker has it.

        Args:
            request_id: the request.
            reason: why, in words: it stands in the request's final.
            index: of one child of a request with several; None for all of it.

        Raises:
            ConfigError: an argument is wrong.
            AbortError: the broker refused the command.
            UnreachableError: it was not acknowledged in time. It may have arrived all the same.
        """
        if not request_id:
            raise ConfigError("request id: is empty")
        if not reason.strip():
            raise ConfigError("reason: is empty; say in words why: it stands in the request's final")
        if len(reason) > MAX_REASON_CHARS:
            raise ConfigError(f"reason: has {len(reason)} characters; at most {MAX_REASON_CHARS} stand in a final")
        if index is not None and index < 0:
            raise ConfigError(f"index: {index}; children are counted from 0")
        now_us = self._now_us()
        command = ControlCommand(
            command_id=new_request_id(),
            kind=CommandKind.ABORT,
            request_id=request_id,
            index=index,
            source=CommandSource.OPERATOR,
            reason=reason,
            decided_at_us=now_us,
            issued_at_us=now_us,
        )
        self._write(command)
        return command

    def answers(self, commands: Iterable[ControlCommand], timeout_s: float) -> Iterator[ControlAck]:
        """Yield what is said of commands, until each has the answer that counts or the time is over.

        `unknown` is no answer that counts: it comes once where a worker has read all prompts and found none of that id,
        and the command binds the request if it comes.

        Args:
            commands: that were sent here.
            timeout_s: how long in all, seconds.
        """
        # Also those that were answered, so that a second answer to one is not taken for the first to another.
        open_ids = {command.command_id for command in commands}
        deadline = time.monotonic() + timeout_s
        reader = self._connection.reader({self._acks: self._start})
        try:
            while open_ids and time.monotonic() < deadline:
                for record in reader.poll_batch(FETCH_RECORDS, POLL_S):
                    ack = self._ack(record.value)
                    if ack is None or ack.command_id not in open_ids:
                        continue
                    if ack.outcome is not AckOutcome.UNKNOWN:
                        open_ids.discard(ack.command_id)
                    yield ack
                for problem in reader.take_events():
                    raise TopicError(f"{problem.partition} cannot be read: {problem.reason}")
        finally:
            reader.close()

    def close(self, timeout_s: float | None = 1.0) -> None:
        """End the clients; each command has been waited for."""
        super().close(timeout_s)

    def _write(self, command: ControlCommand) -> None:
        delivered: list[Delivery] = []
        writer, wait_s = self._connection.writer, self._settings.send_timeout_s
        refused = writer.produce(
            self._control.topic,
            self._codec.encode(command),
            key=command.request_id.encode(),
            partition=self._control.number,
            on_delivery=delivered.append,
        )
        if refused is not None:
            raise AbortError(command.request_id, refused.reason)
        deadline = time.monotonic() + wait_s
        while not delivered:
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    f"abort of {command.request_id}: not acknowledged in {wait_s:g} s; it may have arrived. "
                    "Sending it again does no harm"
                )
            writer.poll(POLL_S)
        error = delivered[0].error
        if error is not None:
            raise AbortError(command.request_id, error.reason)

    def _ack(self, value: bytes | None) -> ControlAck | None:
        try:
            message = self._codec.decode(value)
        except DecodeError:
            return None  # somebody else's record: it answers nothing
        return message if isinstance(message, ControlAck) else None
