"""Which control commands bind which attempts, and which of them still have to be answered.

Feed it the control topic and the acknowledgements from their retention's start. An operator's command names no attempt
and binds every one until it is answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from undercurrent.protocol.messages import AckOutcome, CommandKind, ControlAck, ControlCommand

MAX_REASON_CHARS = 1000
"""What of a command's reason stands in a final."""

# Whoever may write commands chooses these, and answers and finals repeat them: one that no topic takes would end every
# worker that tries to write it.
_MAX_NAME_CHARS = 1024
# An answer carries its request's id twice, as its key too. A bare server's may be long: it is in a header.
_MAX_REQUEST_ID_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Command:
    """A command and when it was read.

    Args:
        message: it.
        received_at_us: microseconds since the Unix epoch.
    """

    message: ControlCommand
    received_at_us: int

    def child(self, children: int) -> int | None:
        """Return the child that is meant of a request that has so many, None where it is every one of them."""
        return None if children == 1 and self.message.index == 0 else self.message.index

    def answer(
        self,
        outcome: AckOutcome,
        *,
        engine: str,
        incarnation: int,
        attempt: int | None = None,
        tokens: int | None = None,
        applied_at_us: int | None = None,
        rollouts: int = 0,
    ) -> ControlAck:
        """Return an answer to it.

        Args:
            outcome: what became of it.
            engine: whose answer it is.
            incarnation: of that engine.
            attempt: that it met, where one is known.
            tokens: generated until it was applied.
            applied_at_us: when it was, microseconds since the Unix epoch.
            rollouts: of a braked one, next offset of the rollouts topic.
        """
        message = self.message
        return ControlAck(
            command_id=message.command_id,
            request_id=message.request_id,
            attempt=attempt,
            engine=engine,
            incarnation=incarnation,
            outcome=outcome,
            token_index=tokens,
            captured_at_us=message.captured_at_us,
            published_at_us=message.published_at_us,
            decided_at_us=message.decided_at_us,
            received_at_us=self.received_at_us,
            applied_at_us=applied_at_us,
            probe=message.probe,
            rollouts=rollouts,
        )


class _Noted(NamedTuple):
    """A command or an answer, as it came."""

    at_us: int
    request_id: str
    command_id: str
    answer: bool


class ControlBook:
    """Commands by request, and what was answered.

    Args:
        keep_us: how long a command counts after it was read, microseconds: as long as the control topic keeps it, so
            that a worker which starts anew knows the same.
    """

    def __init__(self, keep_us: int) -> None:
        self._keep_us = keep_us
        self._commands: dict[str, dict[str, Command]] = {}
        self._answers: set[str] = set()
        self._unknown: set[str] = set()
        self._noted: deque[_Noted] = deque()

    def __len__(self) -> int:
        """Return how many commands and answers are in memory."""
        commands = sum(len(commands) for commands in self._commands.values())
        return commands + len(self._answers) + len(self._unknown)

    def add(self, message: ControlCommand, received_at_us: int) -> Command | None:
        """Note a command; return it when it is new and nobody has answered it, so that it has to be acted on.

        One whose id or probe has a name of kilobytes is none, nor is one whose request has a name of a quarter of a
        megabyte: it could not be answered.
        """
        if message.kind is not CommandKind.ABORT:
            return None
        if max(len(message.command_id), len(message.probe or "")) > _MAX_NAME_CHARS:
            return None
        if len(message.request_id.encode()) > _MAX_REQUEST_ID_BYTES:
            return None
        of_request = self._commands.setdefault(message.request_id, {})
        if message.command_id in of_request:
            return None
        command = Command(message, received_at_us)
        of_request[message.command_id] = command
        self._noted.append(_Noted(received_at_us, message.request_id, message.command_id, answer=False))
        return None if message.command_id in self._answers else command

    def answered(self, ack: ControlAck, now_us: int) -> None:
        """Note an answer; the first one in log order counts, and `unknown` is none, but is not given again."""
        noted = self._unknown if ack.outcome is AckOutcome.UNKNOWN else self._answers
        if ack.command_id not in noted:
            noted.add(ack.command_id)
            self._noted.append(_Noted(now_us, ack.request_id, ack.command_id, answer=True))

    def is_answered(self, command_id: str) -> bool:
        """Return whether an answer that counts is on record."""
        return command_id in self._answers

    def is_told_unknown(self, command_id: str) -> bool:
        """Return whether it is on record that no prompt of its request was there."""
        return command_id in self._unknown

    def binding(
        self, request_id: str, children: int, ignored: Callable[[ControlCommand], bool] = lambda _: False
    ) -> Command | None:
        """Return the command that stops every further attempt of a request, None when it may run.

        Args:
            request_id: the request.
            children: how many it has; a command that names one of several stops that one alone.
            ignored: says which commands are not applied.
        """
        for command in self._commands.get(request_id, {}).values():
            every = command.message.attempt is None and command.child(children) is None
            if every and command.message.command_id not in self._answers and not ignored(command.message):
                return command
        return None

    def unanswered(self, request_id: str | None = None) -> Iterator[Command]:
        """Yield every command, or every one of a request, that has no answer, in the order in which they came."""
        chosen = self._commands.values() if request_id is None else [self._commands.get(request_id, {})]
        for commands in list(chosen):
            for command in list(commands.values()):
                if command.message.command_id not in self._answers:
                    yield command

    def forget(self, request_id: str) -> None:
        """Drop the answered commands of a finished request, to bound memory."""
        for command_id in [name for name in self._commands.get(request_id, ()) if name in self._answers]:
            self._drop(request_id, command_id)

    def expire(self, now_us: int) -> None:
        """Drop what is older than commands are kept, to bound memory; most calls find nothing."""
        while self._noted and self._noted[0].at_us < now_us - self._keep_us:
            noted = self._noted.popleft()
            # With its answer a command goes too, which may have been read after it: it must not seem unanswered.
            self._drop(noted.request_id, noted.command_id)
            if noted.answer:
                self._answers.discard(noted.command_id)
                self._unknown.discard(noted.command_id)

    def _drop(self, request_id: str, command_id: str) -> None:
        commands = self._commands.get(request_id, {})
        commands.pop(command_id, None)
        if not commands:
            self._commands.pop(request_id, None)
