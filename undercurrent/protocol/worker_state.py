"""What an engine worker's protocol knows, and what it does as soon as that has become possible."""

from __future__ import annotations

from collections.abc import Mapping

from undercurrent.protocol.brake import Brake, BrakeLimits
from undercurrent.protocol.control import ControlBook
from undercurrent.protocol.generations import MOST_ATTEMPTS, Ruling
from undercurrent.protocol.guarding import Unguarded
from undercurrent.protocol.guards import GuardBook
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.protocol.messages import (
    Accepted,
    ReleaseReason,
)
from undercurrent.protocol.worker_claims import ClaimDesk
from undercurrent.protocol.worker_commands import CommandDesk
from undercurrent.protocol.worker_finals import FinalDesk
from undercurrent.protocol.worker_handover import drop_run, release_run
from undercurrent.protocol.worker_partition import OwnedPartition
from undercurrent.protocol.worker_runs import Phase, Run, own_abort
from undercurrent.protocol.worker_types import (
    AbortEngine,
    Action,
    HandedOver,
    Now,
    Prompt,
    Publish,
    Purge,
    Reacquire,
    RunKey,
    Stopped,
    Untail,
    WorkerLimits,
)

# Claims that need no engine do not wait for its slots; this only bounds what is written at once.
MAX_CLAIMS_WITHOUT_ENGINE = 64


class WorkerState:
    """What a worker knows, and what follows from it without a further event.

    Args:
        engine: configured name.
        incarnation: offset of this start's EngineStarted.
        prompt_partitions: number of partitions of the prompts topic.
        limits: bounds and patience.
        guards: what is known of the guarding probes.
        brake: when a probe is not listened to any more; never by default.
        holdout: which requests no probe stops; none by default.
    """

    def __init__(
        self,
        engine: str,
        incarnation: int,
        prompt_partitions: int,
        limits: WorkerLimits | None = None,
        guards: GuardBook | None = None,
        brake: BrakeLimits | None = None,
        holdout: HoldoutRule | None = None,
    ) -> None:
        self.engine = engine
        self.incarnation = incarnation
        self.limits = limits or WorkerLimits()
        self.book = ControlBook(int(self.limits.control_keep_s * 1e6))
        self._guards = guards or GuardBook()
        self.brake = Brake(brake)
        self._commands = CommandDesk(engine, incarnation, prompt_partitions, self.book, self.brake, holdout)
        self._claims = ClaimDesk(engine, incarnation, self._commands, self._guards, holdout)
        self._finals = FinalDesk(self.limits, self._guards)
        self._owned: dict[int, OwnedPartition] = {}
        self._runs: dict[RunKey, tuple[OwnedPartition, Run]] = {}
        self._turn = 0
        self._stopping = self._stopped = False
        self._last_tick_s: float | None = None
        self._unproven: set[str] = set()
        self._proof_asked_s = 0.0
        self._proof_serial = self._serial = 0
        self._out: list[Action] = []

    # What the edge may look at.

    @property
    def running(self) -> int:
        """Requests that the engine works on, or is about to."""
        return sum(run.slot and run.phase is not Phase.SETTLING for _, run in self._runs.values())

    @property
    def alone(self) -> RunKey | None:
        """The request that nothing else may run beside, since engines have ended while they ran it."""
        # Until its final is read back: if the next request ends this engine, too, it would be thought the cause.
        return next((key for key, (_, run) in self._runs.items() if run.alone), None)

    @property
    def unsettled(self) -> int:
        """Requests whose finals are not all read back."""
        return len(self._runs)

    @property
    def waiting(self) -> int:
        """Prompts that wait in memory."""
        return sum(partition.backlog() for partition in self._owned.values())

    @property
    def held(self) -> int:
        """Prompts that wait until a point of theirs is guarded."""
        return sum(len(partition.held) for partition in self._owned.values())

    @property
    def unguarded(self) -> Mapping[str, Unguarded]:
        """The points that lack a guard, as of the last look."""
        return self._guards.gate.unguarded

    @property
    def proving(self) -> bool:
        """The loop stood still and has not proved yet that it still belongs to its group."""
        return bool(self._unproven)

    def paused(self) -> Mapping[int, str | None]:
        """Return, for each owned partition, why no prompt should be fetched from it now, None where one may."""
        return {number: self._pause_reason(partition) for number, partition in self._owned.items()}

    def holds(self, key: RunKey) -> bool:
        """Return whether a run is ours, so that its tokens may be published."""
        return key in self._runs

    def positions(self) -> Mapping[int, tuple[int, object]]:
        """Return, for each owned partition, its lowest unfinished offset and that prompt's source, if it is here."""
        return {number: owned.lowest() for number, owned in self._owned.items()}

    def _decide(self, request_id: str | None = None) -> None:
        """Act on commands that nobody has answered: of one request, or all."""
        for command in self.book.unanswered(request_id):
            self._out += self._commands.decide(command, self._owned)

    def _enqueue(self, owned: OwnedPartition, prompt: Prompt) -> None:
        self._place_of(owned, prompt)[prompt.offset] = prompt
        owned.offsets.setdefault(prompt.request_id, prompt.offset)

    def _place_of(self, owned: OwnedPartition, prompt: Prompt) -> dict[int, Prompt]:
        """Return where a prompt waits: for its end, for a guard, or for a slot."""
        gate, where = self._guards.gate, (prompt.points, prompt.stream_partition)
        if prompt.defect is not None or self._commands.binding(prompt.request_id, prompt.n) is not None:
            return owned.urgent
        if gate.stops(*where) is not None:
            return owned.urgent
        return owned.held if gate.holds(*where) else owned.waiting

    def _see_guards(self, now: Now) -> None:
        """Look which points are guarded, and do with their requests what is to be done where they are not."""
        gate = self._guards.gate
        before = gate.lacking
        if not gate.look(now.mono_s) or not gate.acts or not (before or gate.lacking):
            return
        for owned in self._owned.values():
            if owned.leaving is None:
                owned.sort(lambda prompt, owned=owned: self._place_of(owned, prompt))  # type: ignore[misc]
        for _, run in self._runs.values():
            reason = gate.stops(run.prompt.points, run.prompt.stream_partition)
            if reason is not None and run.slot and run.phase is not Phase.SETTLING and None not in run.aborts:
                run.aborts[None] = own_abort(run.prompt.request_id, reason, now)
                self._out += [AbortEngine(run.key)] if run.phase is Phase.RUNNING else []

    def _accepted(self, owned: OwnedPartition, message: Accepted, ruling: Ruling, now: Now) -> None:
        run = owned.claims_of(message, self.incarnation)
        if run is None:
            self._accepted_elsewhere(owned, message, ruling, now)
        elif ruling is Ruling.HOLDS:
            self._out += self._claims.verified(owned, run, now)
            if run.ran:
                self.brake.started(run.key)
            if run.prompt.request_id not in owned.runs:
                self._forget_run(run)
        else:
            self._out += drop_run(owned, run)
            self._claim_again(owned, run)
            self._closed(owned, message.request_id)

    def _accepted_elsewhere(self, owned: OwnedPartition, message: Accepted, ruling: Ruling, now: Now) -> None:
        run = owned.runs.get(message.request_id)
        if run is not None and ruling is Ruling.HOLDS:
            # Somebody else holds it now. As the owner we claim it again, above that attempt.
            self._out += release_run(owned, run, ReleaseReason.LOST_PARTITION, now)
            self._claim_again(owned, run)
        foreign = (message.engine, message.incarnation) != (self.engine, self.incarnation)
        if foreign and owned.epoch < message.epoch < MOST_ATTEMPTS:
            self._drop_partition(owned, ReleaseReason.LOST_PARTITION, now)
            self._out.append(Reacquire(owned.number, message.epoch + 1))

    def _claim_again(self, owned: OwnedPartition, run: Run) -> None:
        """Let the prompt of a run whose attempt is void wait again."""
        self._forget_run(run)
        owned.outbid[run.prompt.request_id] = run.accepted.attempt
        if owned.leaving is None and not owned.progress.is_finished(run.prompt.offset):
            self._enqueue(owned, run.prompt)

    def _closed(self, owned: OwnedPartition, request_id: str) -> None:
        """A valid final was read: the request is over when it was the last child's."""
        state = owned.reader.get(request_id)
        if state is None:
            return
        run = owned.runs.get(request_id)
        if not state.closed:
            self._out += self._commands.child_closed(run, state) if run is not None else []
            return
        if run is None:
            owned.settle(request_id, state.prompt_offset)
            self._decide(request_id)
            self.book.forget(request_id)
            return
        self._out += drop_run(owned, run)
        self._forget_run(run)
        owned.closing[request_id] = run
        done = owned.finished(request_id)
        if done is not None:
            self._out += self._commands.closed(run, done)

    def _pump(self, now: Now) -> list[Action]:
        """Do what has become possible, and hand out the actions."""
        if not self._unproven:
            for owned, run in list(self._runs.values()):
                if run.phase is Phase.SETTLING or run.partly_stopped:
                    self._out += self._finals.settle(owned, run, now)
            self._fill(now)
        for owned in list(self._owned.values()):
            for run in [r for r in owned.closing.values() if not r.acks]:
                del owned.closing[run.prompt.request_id]
                owned.settle(run.prompt.request_id, run.prompt.offset)
                self.book.forget(run.prompt.request_id)
            if owned.leaving is not None and owned.idle:
                self._commit(owned, now, force=True)
                self._out += [Untail(owned.number), HandedOver(owned.number)]
                del self._owned[owned.number]
            else:
                self._commit(owned, now)
        if self._stopping and not self._stopped and not self._owned:
            self._stopped = True
            self._out.append(Stopped())
        out, self._out = self._out, []
        return out

    def _fill(self, now: Now) -> None:
        """Claim prompts: those that need no engine at once, the others as slots are free, partitions in turn."""
        partitions = [owned for owned in self._owned.values() if owned.active]
        free = MAX_CLAIMS_WITHOUT_ENGINE - sum(not run.slot for _, run in self._runs.values())
        for owned in partitions:
            for prompt in list(owned.urgent.values())[: max(0, free)]:
                if self._runs_after_all(owned, prompt, now):
                    continue
                free -= 1
                self._claim(owned, prompt, now)
        slots = min(self.limits.max_in_flight - self.running, 4 * self.limits.max_in_flight - len(self._runs))
        while slots > 0 and not self.alone:
            ready = [owned for owned in partitions if owned.waiting]
            suspect = next((owned for owned in ready if self._claims.runs_alone(owned, _first(owned))), None)
            if not ready or (suspect is not None and any(run.slot for _, run in self._runs.values())):
                return
            self._turn += 1
            owned = suspect or ready[self._turn % len(ready)]
            if self._claim(owned, _first(owned), now):
                slots -= 1

    def _runs_after_all(self, owned: OwnedPartition, prompt: Prompt, now: Now) -> bool:
        """Return whether nothing ends a prompt any more that was to end without an engine; it then waits for a slot."""
        # What was to end it may be answered by another worker meanwhile, or too old.
        place = self._place_of(owned, prompt)
        if place is owned.urgent or (prompt.deadline_us is not None and prompt.deadline_us < now.wall_us):
            return False
        owned.wait_again(prompt, place)
        return True

    def _claim(self, owned: OwnedPartition, prompt: Prompt, now: Now) -> bool:
        """Claim a prompt, or answer it; return whether an engine slot was taken."""
        owned.waiting.pop(prompt.offset, None)
        owned.urgent.pop(prompt.offset, None)
        answer = self._claims.answer(owned, prompt, now)
        if answer is not None:
            self._out += answer
            return False
        run = self._claims.claim(owned, prompt, now)
        owned.runs[prompt.request_id] = run
        self._runs[run.key] = owned, run
        self._out.append(Publish(owned.number, run.accepted))
        self._decide(prompt.request_id)
        return run.slot

    def _commit(self, owned: OwnedPartition, now: Now, *, force: bool = False) -> None:
        commit = owned.position_to_commit(now, self.limits.commit_interval_s, self._serial + 1, force=force)
        if commit is not None:
            self._serial += 1
            self._out.append(commit)

    def _ask_for_proof(self, now: Now) -> None:
        self._proof_asked_s = now.mono_s
        if not self._owned:
            self._unproven.discard("member")
        for owned in self._owned.values():
            self._commit(owned, now, force=True)

    def _release_all(self, owned: OwnedPartition, reason: ReleaseReason, now: Now, *, purge: bool = False) -> None:
        actions: list[Action] = []
        for run in list(owned.runs.values()):
            actions += release_run(owned, run, reason, now, purged=purge)
            self._forget_run(run)
        if purge:
            actions.append(Purge(owned.number))
        # The engine first; what a purge would take back is written after it.
        self._out += sorted(actions, key=lambda action: (AbortEngine, Purge, Publish).index(type(action)))
        owned.closing.clear()

    def _drop_partition(self, owned: OwnedPartition, reason: ReleaseReason, now: Now) -> None:
        """Give a partition up at once."""
        self._release_all(owned, reason, now, purge=True)
        self._out.append(Untail(owned.number))
        self._owned.pop(owned.number, None)
        if "member" in self._unproven and not self._owned:
            self._unproven.discard("member")

    def _forget_run(self, run: Run) -> None:
        self._runs.pop(run.key, None)
        self._guards.drop(*run.key)

    def _get(self, partition: int, epoch: int) -> OwnedPartition | None:
        owned = self._owned.get(partition)
        return owned if owned is not None and owned.epoch == epoch else None

    def _pause_reason(self, owned: OwnedPartition) -> str | None:
        if owned.leaving is not None:
            return "leaving"
        if self._unproven:
            return "proving"
        if not owned.caught_up:
            return "reading_back"
        return "backlog" if owned.is_full(self.limits.max_waiting) else None


def _first(owned: OwnedPartition) -> Prompt:
    return next(iter(owned.waiting.values()))
