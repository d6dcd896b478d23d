"""Which control commands bind which attempts, and which of them still have to be answered.

Feed it the control topic and the acknowledgements from their retention's start. An operator's command names no attempt
and binds every one until it is answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from undercurrent.protocol.messages import AckOutcome, CommandKind, ControlAck, ControlCommand


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


class ControlBook:
    """Commands by request, and what was answered."""

    def __init__(self) -> None:
        self._commands: dict[str, dict[str, Command]] = {}
        self._answers: set[str] = set()

    def add(self, message: ControlCommand, received_at_us: int) -> Command | None:
        """Note a command; return it when it is new and nobody has answered it, so that it has to be acted on."""
        if message.kind is not CommandKind.ABORT:
            return None
        of_request = self._commands.setdefault(message.request_id, {})
        if message.command_id in of_request:
            return None
        command = Command(message, received_at_us)
        of_request[message.command_id] = command
        return None if message.command_id in self._answers else command

    def answered(self, ack: ControlAck) -> None:
        """Note an answer; the first one in log order counts, and `unknown` is none."""
        if ack.outcome is not AckOutcome.UNKNOWN:
            self._answers.add(ack.command_id)

    def is_answered(self, command_id: str) -> bool:
        """Return whether an answer that counts is on record."""
        return command_id in self._answers

    def binding(self, request_id: str, children: int) -> Command | None:
        """Return the command that stops every further attempt of a request, None when it may run.

        Args:
            request_id: the request.
            children: how many it has; a command that names one of several stops that one alone.
        """
        for command in self._commands.get(request_id, {}).values():
            every = command.message.attempt is None and command.child(children) is None
            if every and command.message.command_id not in self._answers:
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
        commands = self._commands.get(request_id)
        if commands is None:
            return
        for command_id in [name for name in commands if name in self._answers]:
            del commands[command_id]
        if not commands:
            del self._commands[request_id]
