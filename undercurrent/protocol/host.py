"""The core of a probe host: records in, verdicts, aborts and commits out; exactly once, and without a client.

State is a function of the log. A transaction holds the outputs of every record below a partition's position and commits
the offset of its oldest open stream, with that position as `emitted_up_to`. After a crash the next owner reads again
from the committed offset, rebuilds silently below `emitted_up_to` and emits from there. Below it, a record of a stream
that started before the committed offset belongs to a closed one and is skipped, unless the stream's state was written
down (see `host_states`): then it goes on from that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial

from undercurrent.protocol.host_events import (
    Action,
    Commit,
    DeadLetter,
    Declare,
    Emission,
    Fetch,
    Incoming,
    Read,
    SendAbort,
    StateKey,
    Step,
    StreamRunner,
    Transaction,
)
from undercurrent.protocol.host_partition import Mark, PartitionState
from undercurrent.protocol.host_position import Declaration, Notice, Resume
from undercurrent.protocol.host_states import Keeping
from undercurrent.protocol.messages import ActivationBlock, EndReason, ProbeState, ProbeVerdict
from undercurrent.protocol.strands import Stretch, one_by_one
from undercurrent.protocol.stream_state import write_stream
from undercurrent.protocol.streams import Nothing, Opened, Stray, Stream, StreamTable, Withheld


class ProbeHost:
    """Decides everything that a probe host does with the partitions of one point.

    Args:
        point: the extraction point.
        fingerprint: of the probe set.
        runner: runs the probes.
        abort_max_age_us: an older record aborts nothing.
        contiguous: every offset is expected; False where records are left out on purpose.
        keeping: how states of long streams are kept; None where they are not.
    """

    def __init__(
        self,
        point: str,
        fingerprint: str,
        runner: StreamRunner,
        abort_max_age_us: int,
        *,
        contiguous: bool = True,
        keeping: Keeping | None = None,
    ) -> None:
        self._point = point
        self._fingerprint = fingerprint
        self._runner = runner
        self._abort_max_age_us = abort_max_age_us
        self._contiguous = contiguous
        self._keeping = keeping
        self._assigned: set[int] = set()
        self._active: dict[int, PartitionState] = {}
        # Partitions that are begun anew by a member that has them already, with what its predecessor had in hand.
        self._again: dict[int, tuple[int | None, int]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    # --- what the host holds

    @property
    def assigned(self) -> frozenset[int]:
        """Partitions that are this member's."""
        return frozenset(self._assigned)

    @property
    def emitted_up_to(self) -> dict[int, int]:
        """Per partition that flows, the first offset without outputs; up to the log's end is the true lag."""
        return {number: partition.emitted_up_to for number, partition in self._active.items()}

    @property
    def waiting(self) -> frozenset[int]:
        """Assigned partitions that do not flow yet."""
        return frozenset(self._assigned - self._active.keys())

    @property
    def ahead(self) -> frozenset[int]:
        """Partitions that should stand still, since too much of them waits for others; none where nothing is joined."""
        return frozenset()

    def open_streams(self, partition: int) -> list[Stream]:
        """Return the open streams of a partition."""
        return list(self._active[partition].table) if partition in self._active else []

    def mark(self, partition: int) -> tuple[int, int]:
        """Return what a commit of now would say of a flowing partition: its offset, and up to where outputs go."""
        return self._mark(partition)[:2]

    @property
    def pending(self) -> int:
        """Outputs that wait for a transaction."""
        return sum(len(item.verdicts) + len(item.dead_letters) for item in self._active.values() if not item.behind)

    @property
    def dirty(self) -> bool:
        """Whether a transaction would write or commit anything new."""
        return bool(self.pending) or any(self._mark(number) != item.committed for number, item in self._active.items())

    def take_counts(self) -> Counter[tuple[str, str]]:
        """Return, and reset, what was counted: (`stray` | `poison` | `abort` | `record`, cause)."""
        counts, self._counts = self._counts, Counter()
        return counts

    # --- partitions come and go

    def assign(self, partitions: Iterable[int]) -> list[Fetch]:
        """Take partitions; they flow after `begin`."""
        new = sorted(set(partitions) - self._assigned)
        self._assigned.update(new)
        return [Fetch(partition) for partition in new]

    def revoke(self, partitions: Iterable[int]) -> None:
        """Give partitions up, by agreement or because they are lost.

        What no transaction has written is dropped: the next owner derives it again from the log.
        """
        for partition in partitions:
            self._assigned.discard(partition)
            self._again.pop(partition, None)
            self._forget(partition)

    def leave(self, partitions: Iterable[int]) -> None:
        """Take note that the next transaction is the last of these partitions, and that nothing stood in its way."""
        for partition in partitions:
            if partition in self._active:
                self._active[partition].leave()

    def begin(self, partition: int, resume: Resume, states: Iterable[ProbeState] = ()) -> list[Action]:
        """Start to read an assigned partition.

        Args:
            partition: its number; nothing happens when it was given up meanwhile.
            resume: from where, as `resume_from` says.
            states: of this partition, the last of each stream, where `resume` says that there are some.
        """
        if partition not in self._assigned:
            return []
        if partition in self._again:
            resume = resume.again(*self._again.pop(partition))
        self._forget(partition)
        limit = None if self._keeping is None else self._keeping.max_replay_bytes
        state = PartitionState(StreamTable(self._point_of(partition)), resume, limit)
        self._active[partition] = state
        declared = [*resume.declarations, *self._restore(partition, state, states)]
        for item in declared:
            state.declare(partition, item)
        actions: list[Action] = [Declare(partition, item) for item in declared]
        if not resume.commit_first:
            state.committed = self._mark(partition)
        return [*actions, *([Commit()] if resume.commit_first else []), Read(partition, resume.offset)]

    def _restore(self, partition: int, state: PartitionState, states: Iterable[ProbeState]) -> list[Declaration]:
        found, begun = state.kept.take(states, state.begun.offset, state.begun.states_from), state.begun
        state.restored((stream, message.read_bytes) for stream, message in found)
        for stream, message in found:
            if not self._runner.restore(partition, stream, message.runs, state.emit_from):
                state.rewrite.add(stream.id)
        if len(found) >= begun.states:
            return []
        return [Declaration(notice=Notice.STATES_LOST, from_offset=begun.offset, to_offset=state.emit_from)]

    def states_end(self, ends: Mapping[int, int]) -> None:
        """Take note of where the topic of states ended, by partition, at some time before now."""
        for partition, end in ends.items():
            if partition in self._active:
                self._active[partition].kept.floor = end

    @property
    def careful(self) -> frozenset[int]:
        """Partitions of which each record has a transaction of its own, and before it one after `take_in_hand`."""
        return frozenset(number for number, state in self._active.items() if state.careful_left)

    def take_in_hand(self, partition: int, offset: int) -> None:
        """Let the next transaction say that a record is about to be worked on."""
        if partition in self._active:
            self._active[partition].take_in_hand(offset)

    def out_of_range(self, partition: int, log_start: int, log_end: int) -> list[Action]:
        """Go on after the broker said that a flowing partition has nothing at its position.

        Args:
            partition: its number.
            log_start: its first offset.
            log_end: offset after its last record.
        """
        state = self._active.get(partition)
        if state is None or log_start <= state.position <= log_end:
            return []
        if state.position > log_end:
            self._start_over(partition)
            return [Fetch(partition)]
        lost = Declaration(notice=Notice.OUT_OF_RANGE, from_offset=state.position, to_offset=log_start)
        offset = max(state.position, state.emit_from)
        aborts = self._run(
            Step(partition=partition, offset=offset, timestamp_us=0, event=event, silent=False)
            for event in state.table.close_before(log_start, EndReason.LOST.value)
        )
        state.declare(partition, lost)
        state.position = log_start
        return [*aborts, Declare(partition, lost), Commit(), Read(partition, log_start)]

    # --- records

    def records(self, batch: Sequence[Incoming | Stretch], now_us: int) -> list[Action]:
        """Take a batch of records, each partition's in order.

        Args:
            batch: the records, also in stretches; those of partitions that do not flow are ignored, they come again.
            now_us: microseconds since the Unix epoch, for the age of aborts alone.

        Returns:
            Aborts to send at once; partitions to read again from an offset that was passed over.
        """
        steps: list[Step] = []
        actions: list[Action] = []
        jumped: set[int] = set()
        blocks = 0
        for record in one_by_one(batch, partial(self._take_stretch, steps, jumped)):
            number, offset, timestamp_us, message, _, _, size, before = record
            state = self._active.get(number)
            if state is None or number in jumped or offset < state.position:
                continue
            if self._contiguous and offset > state.position:
                if state.hole_at != state.position:
                    # Nothing on the topic takes offsets but records: either the client passed some over, which has been
                    # seen, or they are gone. Reading again from there tells which.
                    state.hole_at = state.position
                    jumped.add(number)
                    actions.append(Read(number, state.position))
                    continue
                actions += state.hole(record)
            silent = offset < state.emit_from
            if state.unsettled:
                state.settle(offset)
            if before:
                steps += [Step(number, offset, timestamp_us, event, silent) for event in state.left_out(before)]
            state.read_bytes += size
            arrived = None
            if type(message) is ActivationBlock and offset >= state.plain_from:
                arrived = state.table.take_next(message)
            if arrived is None:
                steps.extend(self._steps(state, record))
            else:
                steps.append(Step(number, offset, timestamp_us, arrived, silent))
                blocks += not silent
            if state.careful_left or offset < state.plain_from:
                state.passed(offset)
            state.position = offset + 1
            if state.read_bytes >= state.limit_at:
                steps += [Step(number, offset, timestamp_us, event, silent) for event in state.limits(size)]
        if blocks:
            self._counts["record", ActivationBlock.__name__] += blocks
        return [*self._run(steps, now_us), *actions]

    def _take_stretch(self, steps: list[Step], jumped: AbstractSet[int], stretch: Stretch) -> bool:
        """Take a stretch whole; return False where its records are to be looked at one by one."""
        state = self._active.get(stretch.partition)
        taken = None if state is None or stretch.partition in jumped else state.take_stretch(stretch)
        if taken is None:
            return False
        steps += taken
        if not taken[0].silent:
            self._counts["record", ActivationBlock.__name__] += len(stretch.records)
        return True

    def _steps(self, state: PartitionState, record: Incoming) -> Iterable[Step]:
        silent = record.offset < state.emit_from
        withheld = state.said_from(record.offset)
        if withheld is not None:
            # Where nobody knew of it when the outputs up to here were written, its letter is still to come.
            self._dead_letter(state, record, "quarantined", silent=silent and record.offset != state.condemned)
        if record.message is None:
            if withheld is None:
                self._dead_letter(state, record, "poison", record.error, silent=silent)
            return
        if not silent:
            self._counts["record", type(record.message).__name__] += 1
        for event in state.table.observe(record.offset, record.message):
            if isinstance(event, Stray):
                if withheld is None:
                    self._dead_letter(state, record, event.cause, silent=silent)
            elif not isinstance(event, Nothing):
                if isinstance(event, Opened):
                    state.opened(event.stream)
                shown = event if withheld is None else Withheld(event.stream, event, withheld)
                yield Step(record.partition, record.offset, record.timestamp_us, shown, silent)

    def _run(self, steps: Iterable[Step], now_us: int = 0) -> list[Action]:
        actions: list[Action] = []
        for emission in self._runner.process(list(steps)):
            if emission.silent:
                continue
            emission = self._too_old(emission, now_us)
            if emission.command is not None:
                actions.append(SendAbort(emission.command))
            self._active[emission.verdict.source_partition].verdicts.append(emission.verdict)
        return actions

    def _too_old(self, emission: Emission, now_us: int) -> Emission:
        if emission.command is None or now_us - emission.timestamp_us <= self._abort_max_age_us:
            return emission
        self._counts["abort", "too_old"] += 1
        return emission.without_abort("too_old")

    # --- transactions

    def transaction(self) -> Transaction:
        """Return all that is pending, and what to commit with it. Answer with `failed` if it is not written."""
        verdicts: list[ProbeVerdict] = []
        dead_letters: list[DeadLetter] = []
        offsets: dict[int, tuple[int, str]] = {}
        states: dict[StateKey, ProbeState | None] = {}
        said: set[int] = set()
        for number, state in sorted(self._active.items()):
            dead_letters += (letters := state.take_letters())
            if letters:
                said.add(number)
            if state.behind:
                continue
            # The signals first: whoever reads "clear up to n" must have read what was found up to n.
            verdicts += [*state.verdicts, *self._runner.watermarks(number)]
            written = self._written(number, state)
            states |= written
            if written or state.verdicts:
                said.add(number)
            state.verdicts = []
        for number, state in sorted(self._active.items()):
            mark = self._mark(number)
            dropped = {StateKey(number, name): None for name in state.kept.drop(mark.offset)}
            if mark != state.committed or dropped or number in said:
                offsets[number] = (mark.offset, mark.metadata(self._fingerprint))
                state.committed = mark
            states |= dropped
        return Transaction(verdicts=tuple(verdicts), dead_letters=tuple(dead_letters), offsets=offsets, states=states)

    def _mark(self, number: int) -> Mark:
        """Return what a commit of now would say of a partition."""
        return self._active[number].mark(self._low(number))

    def _low(self, number: int) -> int:
        """Return the offset to commit of a partition."""
        state = self._active[number]
        return state.table.low_watermark(state.position)

    def _point_of(self, number: int) -> str:
        """Return the point that a partition is of."""
        return self._point

    def _written(self, number: int, state: PartitionState) -> dict[StateKey, ProbeState | None]:
        """Return the states of the streams that hold back too much of their partition."""
        keeping = self._keeping
        found: dict[StateKey, ProbeState | None] = {}
        for stream in [] if keeping is None else state.long_open(keeping.checkpoint_after_bytes):
            runs, text = self._runner.states(number, stream), write_stream(stream)
            if keeping is None or runs is None or text is None:
                continue
            found[StateKey(number, stream.id)] = replace(
                state.wrote(stream, text, runs), service=keeping.service, point=self._point, source_partition=number
            )
        return found

    def failed(self) -> list[Action]:
        """Start every partition over, because a transaction was aborted or its fate is unknown."""
        for partition in list(self._active):
            self._start_over(partition)
        return [Fetch(partition) for partition in sorted(self._assigned)]

    def _start_over(self, partition: int) -> None:
        begun = self._active[partition].begun
        self._again[partition] = begun.in_hand, begun.strikes
        self._forget(partition)

    def _forget(self, partition: int) -> None:
        self._active.pop(partition, None)
        self._runner.forget(partition)

    def _dead_letter(
        self, state: PartitionState, record: Incoming, cause: str, detail: str = "", *, silent: bool
    ) -> None:
        if not silent:
            kind = cause if cause in ("poison", "quarantined") else "stray"
            self._counts[kind, cause] += 1
            state.letter(record, cause, detail)
