"""What becomes of a control command in the worker that owns its prompt's partition.

    running                   the engine stops it at once
    claimed or waiting        it ends as aborted without running
    over                      nothing
    another attempt           nothing: a probe's command names its attempt and cannot hit another one

It is answered once, and a promise about the final only when that was read back from the log: `applied` when the final
names this command, `already` when it names another one, `too_late` when the request was not aborted. A worker that lost
its partition without knowing, or dies in between, so promises nothing that the log does not keep. `stale` promises
nothing: the attempt is over and was not the last, or only the prompt is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping

from undercurrent.protocol.control import Command, ControlBook
from undercurrent.protocol.messages import AckOutcome, ControlAck
from undercurrent.protocol.worker_partition import Finished, OwnedPartition
from undercurrent.protocol.worker_runs import Abort, Phase, Run
from undercurrent.protocol.worker_types import AbortEngine, Acknowledge, Action
from undercurrent.topics import partition_of


class CommandDesk:
    """Decides on commands.

    Args:
        engine: configured name.
        incarnation: of this worker.
        prompt_partitions: number of partitions of the prompts topic.
        book: commands and answers so far.
    """

    def __init__(self, engine: str, incarnation: int, prompt_partitions: int, book: ControlBook) -> None:
        self._engine = engine
        self._incarnation = incarnation
        self._partitions = prompt_partitions
        self._book = book

    def decide(self, command: Command, owned: Mapping[int, OwnedPartition]) -> list[Action]:
        """Act on a command that nobody has answered; nothing when its partition is another worker's."""
        request_id = command.message.request_id
        partition = owned.get(partition_of(request_id, self._partitions))
        if partition is None or not partition.caught_up:
            return []
        run = partition.runs.get(request_id)
        if run is not None:
            return self._running(run, command)
        done = partition.finished(request_id)
        if done is not None:
            return self._answer(command, _outcome(done, command), done, partition.closing.get(request_id))
        if command.message.attempt is not None:
            # Its attempt is over and was not the last: whoever runs the request next takes a higher one.
            return self._answer(command, AckOutcome.STALE)
        offset = partition.offsets.get(request_id)
        if offset is not None and offset in partition.waiting:
            partition.urgent[offset] = partition.waiting.pop(offset)
        return []

    def binding(self, request_id: str) -> Abort | None:
        """Return the abort that a new attempt of a request begins with, if a command binds it."""
        command = self._book.binding(request_id)
        return None if command is None else Abort(command.message, command.received_at_us)

    def closed(self, run: Run, done: Finished) -> list[Action]:
        """The request has its valid final: answer what was meant for it."""
        commands = list(run.late)
        if run.abort is not None:
            commands.insert(0, Command(run.abort.command, run.abort.received_at_us))
        actions: list[Action] = []
        for command in commands:
            if not self._book.is_answered(command.message.command_id):
                actions += self._answer(command, _outcome(done, command), done, run)
        return actions

    def _running(self, run: Run, command: Command) -> list[Action]:
        message = command.message
        if run.abort is not None and run.abort.command.command_id == message.command_id:
            return []
        if message.attempt is not None and message.attempt < run.key.attempt:
            return self._answer(command, AckOutcome.STALE, run=run)
        if message.attempt is not None and message.attempt > run.key.attempt:
            return []
        if run.abort is not None or run.phase is Phase.SETTLING:
            run.late.append(command)
            return []
        run.abort = Abort(message, command.received_at_us)
        return [AbortEngine(run.key)] if run.phase is Phase.RUNNING else []

    def _answer(
        self, command: Command, outcome: AckOutcome, done: Finished | None = None, run: Run | None = None
    ) -> list[Action]:
        message, applied = command.message, outcome is AckOutcome.APPLIED
        attempt = (done.attempt or None) if done is not None else None if run is None else run.key.attempt
        ack = ControlAck(
            command_id=message.command_id,
            request_id=message.request_id,
            attempt=attempt,
            engine=self._engine,
            incarnation=self._incarnation,
            outcome=outcome,
            token_index=done.tokens if done is not None and applied else None,
            captured_at_us=message.captured_at_us,
            published_at_us=message.published_at_us,
            decided_at_us=message.decided_at_us,
            received_at_us=command.received_at_us,
            applied_at_us=run.abort.applied_at_us if applied and run is not None and run.abort is not None else None,
        )
        self._book.answered(ack)
        if run is not None:
            run.acks.add(ack.command_id)
        return [Acknowledge(ack)]


def _outcome(done: Finished, command: Command) -> AckOutcome:
    if done.aborted_by is None:
        return AckOutcome.STALE
    if command.message.command_id in done.aborted_by:
        return AckOutcome.APPLIED
    return AckOutcome.ALREADY if done.aborted_by else AckOutcome.TOO_LATE
