"""What a worker knows of one prompts partition that it owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from undercurrent.protocol.commits import Progress
from undercurrent.protocol.epochs import Position
from undercurrent.protocol.generations import GenerationsReader, RequestState
from undercurrent.protocol.messages import Accepted, Outcome, ReleaseReason
from undercurrent.protocol.worker_runs import Run
from undercurrent.protocol.worker_types import Commit, Now, Prompt

HELD_TIMES = 4
"""Prompts that wait for a guard do not hold up the others before they are so many times `max_waiting`."""


class Aborted(NamedTuple):
    """What a final says of a child that was aborted.

    Args:
        command_id: the command that it names, empty where it names none.
        tokens: generated until then.
    """

    command_id: str
    tokens: int


class Finished(NamedTuple):
    """What is remembered of a request that has ended.

    Args:
        offset: of its prompt.
        content_hash: of its prompt.
        attempt: that closed it, 0 where only the prompt is known.
        children: how many it had.
        aborted: those of them that were aborted; None where only the prompt is known.
    """

    offset: int
    content_hash: bytes
    attempt: int = 0
    children: int = 0
    aborted: Mapping[int, Aborted] | None = None


class OwnedPartition:
    """Prompts, runs, log and progress of one partition, from its acquisition to its loss.

    Args:
        number: of the partition.
        position: what the owner began with; its epoch is this ownership's.
        past: finished prompts by request id, as far back as a repeated id has to be found.
    """

    def __init__(self, number: int, position: Position, past: Mapping[str, Finished] | None = None) -> None:
        self.number = number
        self.epoch = position.epoch
        self.progress = Progress(position)
        self.reader = GenerationsReader()
        self.read_to = position.read_from
        self.caught_up = False
        self.waiting: dict[int, Prompt] = {}
        self.urgent: dict[int, Prompt] = {}
        self.held: dict[int, Prompt] = {}  # until a point of theirs is guarded
        self.offsets: dict[str, int] = {}
        self.outbid: dict[str, int] = {}
        self.runs: dict[str, Run] = {}
        self.closing: dict[str, Run] = {}
        self.answering: set[int] = set()
        self.unreadable: set[int] = set()
        self.leaving: ReleaseReason | None = None
        self.leave_at_s = 0.0
        self._full = False
        # Finished prompts of this window, and of the one before it.
        self._remembered: dict[str, Finished] = dict(past or {})
        self._before: dict[str, Finished] = {}
        self._window_from_s: float | None = None
        self._committed: tuple[int, str] | None = None
        self._commit_sent_s: float | None = None
        self._swept_to = position.offset

    @property
    def active(self) -> bool:
        """Prompts may be claimed here."""
        return self.caught_up and self.leaving is None

    @property
    def idle(self) -> bool:
        """Nothing is in flight."""
        return not self.runs and not self.closing

    def backlog(self) -> int:
        """Prompts that wait in memory."""
        return len(self.waiting) + len(self.urgent) + len(self.held)

    def is_full(self, limit: int) -> bool:
        """Return whether intake should pause: from `limit` prompts on, until half of them have gone.

        Those that wait for a guard count from so many times the limit on: behind them there may be some that need none.
        """
        count = self.backlog() - min(len(self.held), HELD_TIMES * limit)
        # Resuming costs a fetch of what was fetched before, so it is not done for every single prompt.
        self._full = count >= (limit + 1) // 2 if self._full else count >= limit
        return self._full

    def lowest(self) -> tuple[int, object]:
        """Return the lowest unfinished offset, and its prompt's source where it is in memory."""
        low = self.progress.low
        prompt = self.prompt_at(low)
        runs = [*self.runs.values(), *self.closing.values()]
        run = next((run for run in runs if run.prompt.offset == low), None)
        return low, run.prompt.source if run is not None else prompt.source if prompt is not None else None

    def prompt_at(self, offset: int) -> Prompt | None:
        """Return a prompt that waits in memory, for a slot, a guard or its end."""
        return self.waiting.get(offset) or self.urgent.get(offset) or self.held.get(offset)

    def take(self, offset: int) -> None:
        """Let a prompt wait no longer."""
        for prompts in (self.waiting, self.urgent, self.held):
            prompts.pop(offset, None)

    def hurry(self, prompt: Prompt) -> None:
        """Let a prompt end without an engine."""
        self.take(prompt.offset)
        self.urgent[prompt.offset] = prompt

    def wait_again(self, prompt: Prompt, place: dict[int, Prompt]) -> None:
        """Let a prompt wait in a place of its own, in the order of the log."""
        self.take(prompt.offset)
        later = {offset: place.pop(offset) for offset in sorted(place) if offset > prompt.offset}
        place.update({prompt.offset: prompt, **later})

    def sort(self, place_of: Callable[[Prompt], dict[int, Prompt]]) -> None:
        """Let each prompt in memory wait where it belongs now, in the order of the log."""
        prompts = {**self.waiting, **self.urgent, **self.held}
        for held in (self.waiting, self.urgent, self.held):
            held.clear()
        for offset in sorted(prompts):
            place_of(prompts[offset])[offset] = prompts[offset]

    def next_attempt(self, request_id: str) -> int:
        """Return the number of a new attempt: at least the epoch, and above every one that the log has or will have."""
        state = self.reader.get(request_id)
        return max(self.epoch, 1 if state is None else state.attempt + 1, self.outbid.get(request_id, 0) + 1)

    def deaths(self, prompt: Prompt, incarnation: int) -> int:
        """Return how many engines took a prompt and neither ended it nor gave it up.

        Args:
            prompt: it.
            incarnation: of this worker, which lives: its own claims count for nothing.
        """
        state = self.reader.get(prompt.request_id)
        if state is None:
            return self.progress.unexplained(prompt.offset)
        if state.prompt_offset != prompt.offset:
            return 0
        return sum(claimant != incarnation for _, claimant in state.unexplained)

    def finished(self, request_id: str) -> Finished | None:
        """Return what is known of a request that has ended, None where it is open or unknown."""
        state = self.reader.get(request_id)
        if state is not None and state.closed:
            return finished_of(state)
        return self._remembered.get(request_id) or self._before.get(request_id)

    def remember(self, prompt: Prompt) -> None:
        """Note a prompt that was finished by an owner before, so that its id is known.

        One whose id belongs to an open prompt before it was only answered as that one's duplicate.
        """
        known = prompt.request_id in self.offsets or prompt.request_id in self._before
        if not known and self.progress.is_finished(prompt.offset):
            self._remembered.setdefault(prompt.request_id, Finished(prompt.offset, prompt.content_hash))

    def settle(self, request_id: str, offset: int) -> None:
        """Note that a prompt is finished."""
        self.take(offset)
        if self.offsets.get(request_id) == offset:
            del self.offsets[request_id]
            self.outbid.pop(request_id, None)
        self.progress.finish(offset)
        self._sweep()

    def content_hash(self, offset: int) -> bytes:
        """Return the content hash of a prompt in memory, empty when it is not."""
        run = next((run for run in self.runs.values() if run.prompt.offset == offset), None)
        prompt = run.prompt if run else self.prompt_at(offset)
        return prompt.content_hash if prompt else b""

    def forget_old(self, now: Now, window_s: float) -> None:
        """Forget prompts that were finished longer ago than a window; none is that was within it."""
        if self._window_from_s is None:
            self._window_from_s = now.mono_s
        elif now.mono_s - self._window_from_s >= window_s:
            self._before, self._remembered, self._window_from_s = self._remembered, {}, now.mono_s

    def expire(self, now: Now) -> None:
        """Let waiting prompts whose deadline has passed end without an engine."""
        for prompt in [*self.waiting.values(), *self.held.values()]:
            if prompt.deadline_us is not None and prompt.deadline_us < now.wall_us:
                self.hurry(prompt)

    def position_to_commit(self, now: Now, interval_s: float, serial: int, *, force: bool = False) -> Commit | None:
        """Return a commit when there is something new to say and the last one is long enough ago."""
        if not force and self._commit_sent_s is not None:
            # An offset that stands still is worth a commit for its metadata alone, at a tenth of the pace.
            moved = self._committed is None or self._committed[0] != self.progress.low
            if now.mono_s - self._commit_sent_s < (interval_s if moved else 10 * interval_s):
                return None
        position, metadata = self.progress.position(self.reader, self.read_to)
        if not force and (position.offset, metadata) == self._committed:
            return None
        self._committed = (position.offset, metadata)
        self._commit_sent_s = now.mono_s
        return Commit(self.number, position.offset, metadata, serial)

    def commit_failed(self) -> None:
        """Note that the last commit was refused, so that it is tried again."""
        self._committed = None

    def claims_of(self, message: Accepted, incarnation: int) -> Run | None:
        """Return the run whose claim this is."""
        run = self.runs.get(message.request_id)
        if run is None or message.incarnation != incarnation or message.attempt != run.accepted.attempt:
            return None
        return run

    def _sweep(self) -> None:
        """Drop from the reader what lies below the low watermark; the last of it is remembered by name."""
        low = self.progress.low
        # Walking the whole reader for every finished prompt would be quadratic.
        if low - self._swept_to < 64 and len(self.reader) < 256:
            return
        if low == self._swept_to:
            return
        self._swept_to = low
        for state in [s for s in self.reader if s.prompt_offset < low and s.request_id not in self.closing]:
            if state.closed:
                self._remembered[state.request_id] = finished_of(state)
            self.reader.forget(state.request_id)


def finished_of(state: RequestState) -> Finished:
    """Return what the finals of a request say so far."""
    return Finished(
        offset=state.prompt_offset,
        content_hash=state.content_hash,
        attempt=state.attempt,
        children=state.n,
        aborted={
            index: Aborted(final.abort.command_id if final.abort else "", final.generated_tokens)
            for index, final in state.finals.items()
            if final.outcome is Outcome.ABORTED
        },
    )
