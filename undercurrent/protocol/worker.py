"""The engine worker's protocol: events in, actions out; no clock, no I/O.

    core = WorkerCore(name, incarnation, prompt_partitions, limits, guards)
    for action in core.prompt(partition, epoch, prompt, now):
        ...                             # do it, in this order; its answer is another event

The edge may die before, between or after any of the actions: what the log then says is enough for the next owner.
Events of a partition carry the epoch under which they were asked for, so that one which was under way when the
partition left is recognised.

Here is which event touches what, in `worker_state` what follows from it. How a claim, a final, a command or a handover
goes stands in `worker_claims`, `worker_finals`, `worker_commands` and `worker_handover`, the rule of the log in
`generations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from undercurrent.protocol.epochs import Position
from undercurrent.protocol.generations import Ruling
from undercurrent.protocol.messages import (
    Accepted,
    ControlAck,
    ControlCommand,
    GenerationEvent,
    ProbeHeartbeat,
    ProbeVerdict,
    Released,
    ReleaseReason,
    Rollout,
)
from undercurrent.protocol.worker_handover import begin_leaving
from undercurrent.protocol.worker_partition import Finished, OwnedPartition
from undercurrent.protocol.worker_runs import ABORT, Phase
from undercurrent.protocol.worker_state import WorkerState
from undercurrent.protocol.worker_types import (
    Action,
    DeadLetter,
    Defect,
    EndStreams,
    HandedOver,
    Now,
    Prompt,
    ReadControl,
    RunKey,
    StreamKey,
    Tail,
)


class WorkerCore(WorkerState):
    """One engine worker: every event that it can meet. See `WorkerState` for how it is made."""

    # Ownership.

    def acquired(
        self, partition: int, position: Position, now: Now, past: Mapping[str, Finished] | None = None
    ) -> list[Action]:
        """The epoch of a newly assigned partition is committed.

        Args:
            partition: its number.
            position: what was committed.
            now: when.
            past: by request id, the prompts below the position in which a repeated id has to be found.
        """
        if partition in self._owned:
            self._drop_partition(self._owned[partition], ReleaseReason.LOST_PARTITION, now)
        if not self._stopping:
            self._owned[partition] = OwnedPartition(partition, position, past)
            self._out.append(Tail(partition, position.epoch, position.read_from))
        return self._pump(now)

    def caught_up(self, partition: int, epoch: int, now: Now) -> list[Action]:
        """The generations partition has been read to what was its end at acquisition."""
        owned = self._get(partition, epoch)
        if owned is not None and not owned.caught_up:
            owned.caught_up = True
            self._decide()
        return self._pump(now)

    def revoked(self, partitions: Iterable[int], now: Now) -> list[Action]:
        """Partitions are asked back; what is in flight may go on for `handover_s`. Answer: `HandedOver` for each."""
        for number in partitions:
            owned = self._owned.get(number)
            if owned is None:
                self._out.append(HandedOver(number))
            else:
                begin_leaving(owned, ReleaseReason.HANDED_OVER, now.mono_s + self.limits.handover_s)
        return self._pump(now)

    def lost(self, partitions: Iterable[int], now: Now) -> list[Action]:
        """Partitions are gone: another member may have them already."""
        for number in partitions:
            owned = self._owned.get(number)
            if owned is not None:
                self._drop_partition(owned, ReleaseReason.LOST_PARTITION, now)
        return self._pump(now)

    def stop(self, now: Now) -> list[Action]:
        """Take no more prompts; what is in flight may go on for `shutdown_s`. Answer: `Stopped`."""
        self._stopping = True
        for owned in self._owned.values():
            begin_leaving(owned, ReleaseReason.SHUTDOWN, now.mono_s + self.limits.shutdown_s)
        return self._pump(now)

    def committed(self, partition: int, serial: int, ok: bool, now: Now) -> list[Action]:
        """A commit was answered. One from before a pause proves nothing: its answer may have waited all along."""
        owned = self._owned.get(partition)
        if owned is not None and not ok:
            owned.commit_failed()
        if ok and serial >= self._proof_serial:
            self._unproven.discard("member")
        return self._pump(now)

    # Prompts and the log.

    def prompt(self, partition: int, epoch: int, prompt: Prompt, now: Now) -> list[Action]:
        """A prompt was fetched."""
        owned = self._get(partition, epoch)
        if owned is not None and owned.leaving is None:
            if owned.progress.fetched(prompt.offset):
                self._enqueue(owned, prompt)
            else:
                owned.remember(prompt)
                self._decide(prompt.request_id)
        return self._pump(now)

    def unreadable(
        self, partition: int, epoch: int, offset: int, source: object, defect: Defect, now: Now
    ) -> list[Action]:
        """A prompt was fetched that names no request of this partition: it can only go to the dead-letter topic."""
        owned = self._get(partition, epoch)
        if owned is not None and owned.leaving is None and owned.progress.fetched(offset):
            owned.unreadable.add(offset)
            self._out.append(DeadLetter(partition, offset, source, defect.kind, defect.error))
        return self._pump(now)

    def dead_lettered(self, partition: int, offset: int, now: Now) -> list[Action]:
        """A dead letter is acknowledged."""
        owned = self._owned.get(partition)
        if owned is not None:
            run = next((r for r in owned.runs.values() if r.prompt.offset == offset), None)
            if run is not None:
                run.awaiting.discard("dead_letter")
            elif offset in owned.unreadable:
                owned.unreadable.discard(offset)
                owned.settle("", offset)
        return self._pump(now)

    def generation(
        self, partition: int, epoch: int, offset: int, message: Accepted | Released | GenerationEvent, now: Now
    ) -> list[Action]:
        """A record of the generations partition was read."""
        owned = self._get(partition, epoch)
        if owned is None or offset < owned.read_to:
            return []
        ruling = owned.reader.apply(message, offset=offset)
        owned.read_to = offset + 1
        if ruling is Ruling.TOKENS:
            return []
        if isinstance(message, Accepted):
            self._accepted(owned, message, ruling, now)
        elif ruling is Ruling.CLOSED:
            self._closed(owned, message.request_id)
        elif ruling is Ruling.ANSWERED and message.prompt_offset in owned.answering:
            owned.answering.discard(message.prompt_offset)
            owned.settle(message.request_id, message.prompt_offset)
        return self._pump(now)

    # The engine.

    def delta(
        self,
        key: RunKey,
        index: int,
        generated: int,
        finish_reason: str | None,
        now: Now,
        *,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> list[Action]:
        """The engine generated tokens of a child, or ended it; `generated` counts all of its tokens so far."""
        entry = self._runs.get(key)
        child = entry[1].children.get(index) if entry else None
        if entry is None or child is None or child.finish_reason is not None:
            return []
        run = entry[1]
        child.count(generated, prompt_tokens, cached_tokens, now)
        if finish_reason is None:
            return []
        child.finish_reason, child.stopped_at_s = finish_reason, now.mono_s
        abort = run.abort_of(index)
        if finish_reason == ABORT and abort is not None and abort.applied_at_us is None:
            abort.applied_at_us = now.wall_us
        if run.stopped:
            run.phase = Phase.SETTLING
        return self._pump(now)

    def rejected(self, key: RunKey, defect: Defect, now: Now) -> list[Action]:
        """The engine refuses a request."""
        entry = self._runs.get(key)
        if entry is not None:
            self._out += self._finals.rejected(*entry, defect)
        return self._pump(now)

    def streams_ended(self, key: RunKey, streams: Iterable[StreamKey], now: Now) -> list[Action]:
        """The ends of streams are acknowledged: the publisher's own."""
        entry = self._runs.get(key)
        if entry is None:
            return []
        entry[1].streams_ended(streams)
        return self._pump(now)

    def published(self, up_to_s: float, now: Now) -> None:
        """The publisher has written whatever was captured before a time, monotonic."""
        self._finals.published(up_to_s, now)

    def streams_lost(self, ended: EndStreams, now: Now) -> list[Action]:
        """The ends that were asked for are acknowledged."""
        entry = self._runs.get(ended.key)
        if entry is not None:
            entry[1].awaiting.discard(ended.token)
        return self.streams_ended(ended.key, ended.streams, now)

    # Control and verdicts.

    def command(self, message: ControlCommand, now: Now) -> list[Action]:
        """A control command was read."""
        command = self.book.add(message, now.wall_us)
        if command is not None:
            self._out += self._commands.decide(command, self._owned)
        return self._pump(now)

    def control_ack(self, message: ControlAck, now: Now) -> None:
        """An acknowledgement was read, ours or another worker's."""
        self.book.answered(message, now.wall_us)
        self.brake.answered(message)

    def rollout(self, offset: int, entry: Rollout | None) -> None:
        """The record at an offset of the rollouts topic was read; None for one that nobody can read."""
        self.brake.rollout(offset, entry)

    def control_at_end(self, now: Now) -> list[Action]:
        """The control topic was read to what was its end when `ReadControl` asked for it."""
        self._unproven.discard("control")
        return self._pump(now)

    def prompts_end(self, ends: Mapping[int, int], asked_at_us: int, now: Now) -> list[Action]:
        """Partitions of the prompts topic ended there when that was asked for."""
        for number, end in ends.items():
            owned = self._owned.get(number)
            if owned is not None:
                self._out += self._commands.unknown(owned, end, asked_at_us)
        return self._pump(now)

    def ack_delivered(self, command_id: str, now: Now) -> list[Action]:
        """An acknowledgement of ours is on the log."""
        for owned in self._owned.values():
            for run in [*owned.runs.values(), *owned.closing.values()]:
                run.acks.discard(command_id)
        return self._pump(now)

    def heartbeat(self, message: ProbeHeartbeat, now: Now) -> None:
        """A probe host lives."""
        self._guards.heartbeat(message, now.mono_s)

    def verdict(self, message: ProbeVerdict, now: Now) -> list[Action]:
        """A probe has said something."""
        self._guards.verdict(message)
        return self._pump(now) if RunKey(message.request_id, message.attempt) in self._runs else []

    def tick(self, now: Now) -> list[Action]:
        """Time has passed. Call it several times a second."""
        paused_s = 0.0 if self._last_tick_s is None else now.mono_s - self._last_tick_s
        self._last_tick_s = now.mono_s
        if paused_s > self.limits.pause_s:
            self._guards.slept(paused_s)
            self._unproven = {"control", "member"}
            self._proof_serial = self._serial + 1
            self._out.append(ReadControl())
            self._ask_for_proof(now)
        elif "member" in self._unproven and now.mono_s - self._proof_asked_s > self.limits.proof_retry_s:
            self._ask_for_proof(now)
        self._see_guards(now)
        for owned in list(self._owned.values()):
            if owned.leaving is not None and now.mono_s >= owned.leave_at_s:
                self._release_all(owned, owned.leaving, now)
            owned.expire(now)
            owned.forget_old(now, self.limits.dedupe_window_s)
        self.book.expire(now.wall_us)
        return self._pump(now)
