"""What becomes of a control command in the worker that owns its prompt's partition.

    running                   the engine stops it; `applied` when it has, `too_late` when every child ended before
    claimed or waiting        it ends as aborted without running; `applied` at token 0
    stopped already           `already`
    finished                  `too_late`, or `already` when it was aborted
    another attempt           `stale`: a probe's command names its attempt and cannot hit another one

An acknowledgement is written once per command. `applied` is written when nothing can undo it any more; `too_late` when
the valid final was read.
"""

from __future__ import annotations

from collections.abc import Mapping

from undercurrent.protocol.control import Command, ControlBook
from undercurrent.protocol.messages import AckOutcome
from undercurrent.protocol.worker_partition import Finished, OwnedPartition
from undercurrent.protocol.worker_runs import Abort, Phase, Run, acknowledgement
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
            # Where only its prompt is known, neither of the two promises can be made.
            known = AckOutcome.ALREADY if done.aborted else AckOutcome.TOO_LATE
            outcome = AckOutcome.STALE if done.aborted is None else known
            return self._answer(command, outcome, done.attempt or None, run=partition.closing.get(request_id))
        if command.message.attempt is not None:
            # Its attempt is over and was not the last: whoever runs the request next takes a higher one.
            return self._answer(command, AckOutcome.STALE, None)
        offset = partition.offsets.get(request_id)
        if offset is not None and offset in partition.waiting:
            partition.urgent[offset] = partition.waiting.pop(offset)
        return []

    def binding(self, request_id: str) -> Abort | None:
        """Return the abort that a new attempt of a request begins with, if a command binds it."""
        command = self._book.binding(request_id)
        return None if command is None else Abort(command.message, command.received_at_us)

    def applied(self, run: Run) -> list[Action]:
        """A run has stopped because of its command: say so, unless it was said for an attempt before."""
        abort = run.abort
        if abort is None or abort.acknowledged:
            return []
        abort.acknowledged = True
        if self._book.is_answered(abort.command.command_id):
            return []
        command = Command(abort.command, abort.received_at_us)
        return self._answer(command, AckOutcome.APPLIED, run.key.attempt, run=run, applied_at_us=abort.applied_at_us)

    def engine_done(self, run: Run) -> None:
        """Every child has ended. A command that stopped none of them came too late; its answer waits for the final."""
        if run.abort is not None and not run.abort.acknowledged:
            run.late.append((run.abort.command, run.abort.received_at_us))
            run.abort = None

    def closed(self, run: Run, done: Finished | None) -> list[Action]:
        """The request has its valid final: answer what came too late for it."""
        actions: list[Action] = []
        outcome = AckOutcome.ALREADY if done is not None and done.aborted else AckOutcome.TOO_LATE
        for message, received_at_us in run.late:
            if not self._book.is_answered(message.command_id):
                actions += self._answer(Command(message, received_at_us), outcome, run.key.attempt, run=run)
        if run.abort is not None and not self._book.is_answered(run.abort.command.command_id):
            actions += self._answer(Command(run.abort.command, run.abort.received_at_us), outcome, None, run=run)
        return actions

    def _running(self, run: Run, command: Command) -> list[Action]:
        message = command.message
        if run.abort is not None and run.abort.command.command_id == message.command_id:
            return []
        if message.attempt is not None and message.attempt < run.key.attempt:
            return self._answer(command, AckOutcome.STALE, run.key.attempt, run=run)
        if message.attempt is not None and message.attempt > run.key.attempt:
            return []
        if run.abort is not None:
            if run.abort.acknowledged:
                return self._answer(command, AckOutcome.ALREADY, run.key.attempt, run=run)
            run.late.append((message, command.received_at_us))
            return []
        if run.phase is Phase.SETTLING:
            run.late.append((message, command.received_at_us))
            return []
        run.abort = Abort(message, command.received_at_us)
        return [AbortEngine(run.key)] if run.phase is Phase.RUNNING else []

    def _answer(
        self,
        command: Command,
        outcome: AckOutcome,
        attempt: int | None,
        *,
        run: Run | None = None,
        applied_at_us: int | None = None,
    ) -> list[Action]:
        ack = acknowledgement(
            command.message,
            outcome,
            engine=self._engine,
            incarnation=self._incarnation,
            received_at_us=command.received_at_us,
            attempt=attempt,
            token_index=run.token_index if run is not None and outcome is AckOutcome.APPLIED else None,
            applied_at_us=applied_at_us,
        )
        self._book.answered(ack)
        if run is not None:
            run.acks.add(ack.command_id)
        return [Acknowledge(ack)]
