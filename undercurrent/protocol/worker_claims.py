"""Claiming prompts: what is written before the engine sees one, and what follows when the claim was read back."""

from __future__ import annotations

from undercurrent.protocol.generations import RequestState
from undercurrent.protocol.guards import GuardBook
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.protocol.messages import Accepted, GenerationEvent, GenerationKind
from undercurrent.protocol.worker_commands import CommandDesk
from undercurrent.protocol.worker_finals import dead_letter
from undercurrent.protocol.worker_handover import release_run
from undercurrent.protocol.worker_partition import OwnedPartition
from undercurrent.protocol.worker_runs import ENGINE_LOST, Child, Phase, Run, own_abort
from undercurrent.protocol.worker_types import AbortEngine, Action, Defect, Now, Prompt, Publish, Start

DEATHS_ALONE = 2
"""A prompt that so many engines have not survived runs in an engine of its own."""
DEATHS_LOST = 3
"""One that so many have not survived does not run again."""


class ClaimDesk:
    """Makes runs out of prompts.

    Args:
        engine: configured name.
        incarnation: of this worker.
        commands: says which command binds a request.
        guards: watches the runs.
        holdout: says which requests no probe stops.
    """

    def __init__(
        self,
        engine: str,
        incarnation: int,
        commands: CommandDesk,
        guards: GuardBook,
        holdout: HoldoutRule | None = None,
    ) -> None:
        self._engine = engine
        self._incarnation = incarnation
        self._commands = commands
        self._guards = guards
        self._holdout = holdout or HoldoutRule()

    def claim(self, owned: OwnedPartition, prompt: Prompt, now: Now) -> Run:
        """Return a run whose Accepted has to be written: one that takes an engine slot, or one that only ends."""
        expired = prompt.deadline_us is not None and prompt.deadline_us < now.wall_us
        abort = self._commands.binding(prompt.request_id, prompt.n)
        defect = prompt.defect or self._lost(owned, prompt)
        slot = abort is None and defect is None and not expired
        unguarded = self._guards.gate.stops(prompt.points, prompt.stream_partition) if slot else None
        if unguarded is not None:
            abort, slot = own_abort(prompt.request_id, unguarded, now), False
        accepted = Accepted(
            request_id=prompt.request_id,
            attempt=owned.next_attempt(prompt.request_id),
            engine=self._engine,
            incarnation=self._incarnation,
            epoch=owned.epoch,
            prompt_partition=owned.number,
            prompt_offset=prompt.offset,
            content_hash=prompt.content_hash,
            points=prompt.points if slot else (),
            stream_partition=prompt.stream_partition,
            n=prompt.n,
            accepted_at_us=now.wall_us,
        )
        run = Run(
            prompt=prompt,
            accepted=accepted,
            slot=slot,
            defect=defect,
            expired=expired,
            alone=slot and self.runs_alone(owned, prompt),
            holdout=self._holdout.of(prompt.request_id),
        )
        if abort is not None:
            run.aborts[None] = abort
        return run

    def runs_alone(self, owned: OwnedPartition, prompt: Prompt) -> bool:
        """Return whether a prompt is suspected of ending the engine that runs it, and has its last try."""
        return DEATHS_ALONE <= owned.deaths(prompt, self._incarnation) < DEATHS_LOST

    def _lost(self, owned: OwnedPartition, prompt: Prompt) -> Defect | None:
        deaths = owned.deaths(prompt, self._incarnation)
        if deaths < DEATHS_LOST:
            return None
        state = owned.reader.get(prompt.request_id)
        attempts = "" if state is None else f" (attempts {', '.join(str(a) for a, _ in state.unexplained)})"
        said = f"{deaths} engines ended while they ran it{attempts}, the last of them with nothing else to run"
        return Defect(kind=ENGINE_LOST, error=f"{said}; it is not run again")

    def verified(self, owned: OwnedPartition, run: Run, now: Now) -> list[Action]:
        """The claim was read back and holds: run it, end it, or give it up again."""
        state = owned.reader.get(run.prompt.request_id)
        if state is None:
            return []
        run.holder = state
        # This worker's own streams get their ends from its publisher.
        run.previous = tuple(s for s in state.earlier if s.points and s.incarnation != self._incarnation)
        run.children = {index: Child(open_streams=set(run.accepted.points)) for index in state.open_children}
        if owned.leaving is not None:
            return release_run(owned, run, owned.leaving, now)
        if run.slot and not run.aborted:
            run.phase, run.ran = Phase.RUNNING, True
            self._guards.watch(*run.key, run.accepted.points, run.accepted.stream_partition)
            alone = [AbortEngine(run.key, index) for index in run.aborts if index in run.children]
            return [Start(owned.number, run.key, run.prompt, _after(state), run.alone), *alone]
        run.phase = Phase.SETTLING
        run.awaiting.add("previous")
        for child in run.children.values():
            child.open_streams.clear()
        for abort in run.aborts.values():
            abort.applied_at_us = now.wall_us
        return [dead_letter(owned, run, run.defect)] if run.defect is not None and not run.aborted else []

    def answer(self, owned: OwnedPartition, prompt: Prompt, now: Now) -> list[Action] | None:
        """Return what settles a prompt that must not run, None when it may.

        It must not when another prompt of this partition has its id and is finished or came earlier.
        """
        # A finished prompt itself never comes here: what the log closes is settled there.
        done = owned.finished(prompt.request_id)
        state = owned.reader.get(prompt.request_id)
        if done is not None:
            offset, content_hash, attempt = done.offset, done.content_hash, done.attempt
        else:
            offset = owned.offsets.get(prompt.request_id, prompt.offset)
            content_hash, attempt = owned.content_hash(offset), 0
            if state is not None and state.prompt_offset <= offset:
                offset, content_hash, attempt = state.prompt_offset, state.content_hash, state.attempt
            if offset >= prompt.offset:
                return None
        same = content_hash == prompt.content_hash
        owned.answering.add(prompt.offset)
        event = GenerationEvent(
            request_id=prompt.request_id,
            attempt=attempt,
            engine=self._engine,
            incarnation=self._incarnation,
            kind=GenerationKind.DUPLICATE if same else GenerationKind.REFUSED,
            prompt_partition=owned.number,
            prompt_offset=prompt.offset,
            error=f"the prompt at offset {offset} has this id{'' if same else ', and other content'}",
            emitted_at_us=now.wall_us,
        )
        return [Publish(owned.number, event)]


def _after(state: RequestState) -> str | None:
    """Return why a request is begun anew, None when it is not."""
    if not state.earlier:
        return None
    return "lost" if len(state.unexplained) > 1 else "released"
