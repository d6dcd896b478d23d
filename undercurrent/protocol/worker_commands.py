"""What becomes of a control command in the worker that owns its prompt's partition.

    running                   the engine stops it at once
    claimed or waiting        it ends as aborted without running
    over                      nothing
    another attempt           nothing: a probe's command names its attempt and cannot hit another one
    of a braked probe         nothing, whatever runs: it is answered `braked`, and the request goes on
    a probe's, of a request   nothing before the request is over: it is answered `held_out`, and the request goes on
        that is held out

A command that names a child of a request with several stops that one alone, and what is said below of the final is said
of that child's. Such a request always starts as a whole: a child that is not wanted any more is stopped right then.

It is answered once, and a promise about the final only when that was read back from the log: `applied` when the final
names this command, `already` when it names another one, `too_late` when the request was not aborted. A worker that lost
its partition without knowing, or dies in between, so promises nothing that the log does not keep. `stale` promises
nothing: the attempt is over and was not the last, only the prompt is remembered, or the request has no such child.
`unknown` is said once of an operator's command when every prompt before it was read and none has its id: it is no
answer that counts, and the command binds the request if it comes.
"""

from __future__ import annotations

from collections.abc import Mapping

from undercurrent.protocol.brake import Brake
from undercurrent.protocol.control import Command, ControlBook
from undercurrent.protocol.generations import RequestState
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.protocol.messages import AckOutcome
from undercurrent.protocol.worker_partition import Finished, OwnedPartition, finished_of
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
        brake: says which probes are not listened to.
        holdout: says which requests no probe stops.
    """

    def __init__(
        self,
        engine: str,
        incarnation: int,
        prompt_partitions: int,
        book: ControlBook,
        brake: Brake | None = None,
        holdout: HoldoutRule | None = None,
    ) -> None:
        self._engine = engine
        self._incarnation = incarnation
        self._partitions = prompt_partitions
        self._book = book
        self._brake = brake or Brake()
        self._holdout = holdout or HoldoutRule()

    def decide(self, command: Command, owned: Mapping[int, OwnedPartition]) -> list[Action]:
        """Act on a command that nobody has answered; nothing when its partition is another worker's."""
        request_id = command.message.request_id
        partition = owned.get(partition_of(request_id, self._partitions))
        if partition is None or not partition.caught_up:
            return []
        run = partition.runs.get(request_id)
        if run is not None:
            return self._running(run, command, partition.reader.get(request_id))
        done = partition.finished(request_id)
        if done is not None:
            return self._settle(command, done, partition.closing.get(request_id))
        if command.message.attempt is not None:
            # Its attempt is over and was not the last: whoever runs the request next takes a higher one.
            return self._answer(command, AckOutcome.STALE)
        if self._holdout.ignores(command.message):
            return self._answer(command, AckOutcome.HELD_OUT)
        offset = partition.offsets.get(request_id)
        waiting = None if offset is None else partition.prompt_at(offset)
        if waiting is not None and command.child(waiting.n) is None:
            partition.hurry(waiting)
        return []

    def unknown(self, owned: OwnedPartition, end: int, asked_at_us: int) -> list[Action]:
        """The partition of the prompts ended here: tell of the commands before that which request is not there.

        Args:
            owned: the partition.
            end: of its prompts.
            asked_at_us: when that was asked for; what was commanded later may name a prompt that came later.
        """
        if not owned.active or owned.progress.fetched_to < end:
            return []
        return [
            action
            for command in self._book.unanswered()
            if command.received_at_us < asked_at_us and self._names_nothing(command, owned)
            for action in self._answer(command, AckOutcome.UNKNOWN)
        ]

    def _names_nothing(self, command: Command, owned: OwnedPartition) -> bool:
        request_id = command.message.request_id
        return (
            partition_of(request_id, self._partitions) == owned.number
            and not self._book.is_told_unknown(command.message.command_id)
            and request_id not in owned.offsets
            and request_id not in owned.runs
            and owned.finished(request_id) is None
        )

    def binding(self, request_id: str, children: int) -> Abort | None:
        """Return the abort that a new attempt of a request begins with, if a command binds all of its children."""
        command = self._book.binding(request_id, children, self._holdout.ignores)
        return None if command is None else Abort(command.message, command.received_at_us)

    def closed(self, run: Run, done: Finished) -> list[Action]:
        """The request has its last valid final: answer what was meant for it."""
        return [action for command in self._pending(run) for action in self._settle(command, done, run)]

    def child_closed(self, run: Run, state: RequestState) -> list[Action]:
        """A child has its valid final, others are open: answer what was meant for it alone."""
        done = finished_of(state)
        commands = [command for command in self._pending(run) if command.child(run.prompt.n) in state.finals]
        return [action for command in commands for action in self._settle(command, done, run)]

    def _pending(self, run: Run) -> list[Command]:
        commands = [*run.commands, *run.late]
        return [command for command in commands if not self._book.is_answered(command.message.command_id)]

    def _running(self, run: Run, command: Command, state: RequestState | None) -> list[Action]:
        message, index = command.message, command.child(run.prompt.n)
        if any(pending.message.command_id == message.command_id for pending in self._pending(run)):
            return []
        if message.attempt is not None and message.attempt < run.key.attempt:
            return self._answer(command, AckOutcome.STALE, attempt=run.key.attempt, run=run)
        if message.attempt is not None and message.attempt > run.key.attempt:
            return []
        if index is not None and not 0 <= index < run.prompt.n:
            return self._answer(command, AckOutcome.STALE, attempt=run.key.attempt, run=run)
        if index is not None and state is not None and index in state.finals:
            return self._settle(command, finished_of(state), run)
        stopped = run.aborts.keys() & {None, index} or run.phase is Phase.SETTLING
        if stopped or (index in run.children and run.children[index].finish_reason is not None):
            run.late.append(command)
            return []
        if self._holdout.ignores(message):
            return self._answer(command, AckOutcome.HELD_OUT, attempt=run.key.attempt, run=run)
        if self._brake.refuses(message, run.key):
            return self._answer(command, AckOutcome.BRAKED, attempt=run.key.attempt, run=run)
        run.aborts[index] = Abort(message, command.received_at_us)
        return [AbortEngine(run.key, index)] if run.phase is Phase.RUNNING else []

    def _settle(self, command: Command, done: Finished, run: Run | None) -> list[Action]:
        """Answer a command for which all has been read that it asks for."""
        outcome, tokens = _outcome(done, command)
        return self._answer(command, outcome, attempt=done.attempt or None, run=run, tokens=tokens)

    def _answer(
        self,
        command: Command,
        outcome: AckOutcome,
        *,
        attempt: int | None = None,
        run: Run | None = None,
        tokens: int | None = None,
    ) -> list[Action]:
        command_id = command.message.command_id
        aborts = () if run is None or outcome is not AckOutcome.APPLIED else run.aborts.values()
        ack = command.answer(
            outcome,
            engine=self._engine,
            incarnation=self._incarnation,
            attempt=attempt,
            tokens=tokens,
            applied_at_us=next((a.applied_at_us for a in aborts if a.command.command_id == command_id), None),
            rollouts=self._brake.rollouts if outcome is AckOutcome.BRAKED else 0,
        )
        self._book.answered(ack, ack.received_at_us)
        if run is not None:
            run.acks.add(ack.command_id)
        return [Acknowledge(ack)]


def _outcome(done: Finished, command: Command) -> tuple[AckOutcome, int | None]:
    """Return what became of a command, and the tokens that were generated until it was applied."""
    index = command.child(done.children)
    if done.aborted is None or (index is not None and not 0 <= index < done.children):
        return AckOutcome.STALE, None
    aborted = [child for number, child in done.aborted.items() if index in {None, number}]
    tokens = [child.tokens for child in aborted if child.command_id == command.message.command_id]
    if tokens:
        return AckOutcome.APPLIED, max(tokens)
    return AckOutcome.ALREADY if aborted else AckOutcome.TOO_LATE, None
