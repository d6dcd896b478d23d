"""The core of a probe host: records in, verdicts, aborts and commits out; exactly once, and without a client.

State is a function of the log. A transaction holds the outputs of every record below a partition's position and commits
the offset of its oldest open stream, with that position as `emitted_up_to`. After a crash the next owner reads again
from the committed offset, rebuilds silently below `emitted_up_to` and emits from there. Below it, a record of a stream
that started before the committed offset belongs to a closed one and is skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

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
    Step,
    StreamRunner,
    Transaction,
)
from undercurrent.protocol.host_position import Declaration, HostMetadata, Notice, Resume
from undercurrent.protocol.messages import EndReason, ProbeVerdict
from undercurrent.protocol.streams import Nothing, Stray, Stream, StreamTable


@dataclass(slots=True)
class _Partition:
    table: StreamTable
    emit_from: int
    position: int
    hole_at: int | None = None
    committed: tuple[int, int] | None = None
    verdicts: list[ProbeVerdict] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)

    @property
    def emitted_up_to(self) -> int:
        """The first offset whose outputs are not written once all that is pending is."""
        return max(self.position, self.emit_from)

    def mark(self) -> tuple[int, int]:
        """Return offset and emitted-up-to as a commit of now would have them."""
        return self.table.low_watermark(self.position), self.emitted_up_to


class ProbeHost:
    """Decides everything that a probe host does with the partitions of one point.

    Args:
        point: the extraction point.
        fingerprint: of the probe set.
        runner: runs the probes.
        abort_max_age_us: an older record aborts nothing.
        contiguous: every offset is expected; False where records are left out on purpose.
    """

    def __init__(
        self,
        point: str,
        fingerprint: str,
        runner: StreamRunner,
        abort_max_age_us: int,
        *,
        contiguous: bool = True,
    ) -> None:
        self._point = point
        self._fingerprint = fingerprint
        self._runner = runner
        self._abort_max_age_us = abort_max_age_us
        self._contiguous = contiguous
        self._assigned: set[int] = set()
        self._active: dict[int, _Partition] = {}
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

    def open_streams(self, partition: int) -> list[Stream]:
        """Return the open streams of a partition."""
        state = self._active.get(partition)
        return [] if state is None else list(state.table)

    @property
    def pending(self) -> int:
        """Outputs that wait for a transaction."""
        return sum(len(item.verdicts) + len(item.dead_letters) for item in self._active.values())

    @property
    def dirty(self) -> bool:
        """Whether a transaction would write or commit anything new."""
        return any(item.committed is None or item.mark() != item.committed for item in self._active.values()) or bool(
            self.pending
        )

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
            self._forget(partition)

    def begin(self, partition: int, resume: Resume) -> list[Action]:
        """Start to read an assigned partition.

        Args:
            partition: its number; nothing happens when it was given up meanwhile.
            resume: from where, as `resume_from` says.
        """
        if partition not in self._assigned:
            return []
        self._forget(partition)
        state = _Partition(StreamTable(self._point), resume.emitted_up_to, resume.offset)
        if not resume.commit_first:
            state.committed = (resume.offset, resume.emitted_up_to)
        self._active[partition] = state
        for item in resume.declarations:
            self._declare_loss(state, partition, item)
        actions: list[Action] = [Declare(partition, item) for item in resume.declarations]
        return [*actions, *([Commit()] if resume.commit_first else []), Read(partition, resume.offset)]

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
            self._forget(partition)
            return [Fetch(partition)]
        lost = Declaration(notice=Notice.OUT_OF_RANGE, from_offset=state.position, to_offset=log_start)
        offset = max(state.position, state.emit_from)
        self._run(
            Step(partition=partition, offset=offset, timestamp_us=0, event=event, silent=False)
            for event in state.table.close_all(EndReason.LOST.value)
        )
        self._declare_loss(state, partition, lost)
        state.position = log_start
        return [Declare(partition, lost), Commit(), Read(partition, log_start)]

    # --- records

    def records(self, batch: Sequence[Incoming], now_us: int) -> list[Action]:
        """Take a batch of records, each partition's in order.

        Args:
            batch: the records; those of partitions that do not flow are ignored, they come again.
            now_us: microseconds since the Unix epoch, for the age of aborts alone.

        Returns:
            Aborts to send at once; partitions to read again from an offset that was passed over.
        """
        steps: list[Step] = []
        actions: list[Action] = []
        jumped: set[int] = set()
        for record in batch:
            number, state = record.partition, self._active.get(record.partition)
            if state is None or number in jumped or record.offset < state.position:
                continue
            if self._contiguous and record.offset > state.position:
                if state.hole_at != state.position:
                    # Nothing on the topic takes offsets but records: either the client passed some over, which has been
                    # seen, or they are gone. Reading again from there tells which.
                    state.hole_at = state.position
                    jumped.add(number)
                    actions.append(Read(number, state.position))
                    continue
                actions += self._hole(state, record)
            steps.extend(self._steps(state, record))
            state.position = record.offset + 1
        return [*self._run(steps, now_us), *actions]

    def _hole(self, state: _Partition, record: Incoming) -> list[Action]:
        if record.offset <= state.emit_from:
            return []
        lost = Declaration(notice=Notice.HOLE, from_offset=state.position, to_offset=record.offset)
        self._declare_loss(state, record.partition, lost)
        return [Declare(record.partition, lost)]

    def _steps(self, state: _Partition, record: Incoming) -> Iterable[Step]:
        silent = record.offset < state.emit_from
        if record.message is None:
            self._dead_letter(state, record, "poison", record.error, silent=silent)
            return
        if not silent:
            self._counts["record", type(record.message).__name__] += 1
        for event in state.table.observe(record.offset, record.message):
            if isinstance(event, Stray):
                self._dead_letter(state, record, "stray", event.cause, silent=silent)
            elif not isinstance(event, Nothing):
                yield Step(
                    partition=record.partition,
                    offset=record.offset,
                    timestamp_us=record.timestamp_us,
                    event=event,
                    silent=silent,
                )

    def _run(self, steps: Iterable[Step], now_us: int = 0) -> list[Action]:
        actions: list[Action] = []
        for emission in self._runner.process(list(steps)):
            state = self._active[emission.verdict.source_partition]
            if emission.verdict.source_offset < state.emit_from:
                continue
            emission = self._too_old(emission, now_us)
            if emission.command is not None:
                actions.append(SendAbort(emission.command))
            state.verdicts.append(emission.verdict)
        return actions

    def _too_old(self, emission: Emission, now_us: int) -> Emission:
        if emission.command is None or now_us - emission.timestamp_us <= self._abort_max_age_us:
            return emission
        self._counts["abort", "too_old"] += 1
        metadata = {**emission.verdict.metadata, "abort": "too_old"}
        return replace(emission, verdict=replace(emission.verdict, command_id=None, metadata=metadata), command=None)

    # --- transactions

    def transaction(self) -> Transaction:
        """Return all that is pending, and what to commit with it. Answer with `failed` if it is not written."""
        verdicts: list[ProbeVerdict] = []
        dead_letters: list[DeadLetter] = []
        offsets: dict[int, tuple[int, str]] = {}
        for number, state in sorted(self._active.items()):
            # The signals first: whoever reads "clear up to n" must have read what was found up to n.
            verdicts += [*state.verdicts, *self._runner.watermarks(number)]
            dead_letters += state.dead_letters
            mark = state.mark()
            if mark != state.committed or state.verdicts or state.dead_letters:
                metadata = HostMetadata(emitted_up_to=mark[1], fingerprint=self._fingerprint)
                offsets[number] = (mark[0], metadata.to_text())
                state.committed = mark
            state.verdicts = []
            state.dead_letters = []
        return Transaction(verdicts=tuple(verdicts), dead_letters=tuple(dead_letters), offsets=offsets)

    def failed(self) -> list[Action]:
        """Start every partition over, because a transaction was aborted or its fate is unknown."""
        for partition in list(self._active):
            self._forget(partition)
        return [Fetch(partition) for partition in sorted(self._assigned)]

    def _forget(self, partition: int) -> None:
        self._active.pop(partition, None)
        self._runner.forget(partition)

    def _dead_letter(self, state: _Partition, record: Incoming, kind: str, detail: str, *, silent: bool) -> None:
        if silent:
            return
        cause = detail if kind == "stray" else kind
        self._counts[kind, cause] += 1
        state.dead_letters.append(
            DeadLetter(partition=record.partition, offset=record.offset, cause=cause, detail=detail, raw=record.raw)
        )

    def _declare_loss(self, state: _Partition, partition: int, item: Declaration) -> None:
        if item.notice.is_loss:
            state.dead_letters.append(
                DeadLetter(
                    partition=partition,
                    offset=item.from_offset,
                    cause=item.notice.value,
                    detail=f"offsets {item.from_offset} to {item.to_offset - 1} are not in the log",
                    to_offset=item.to_offset,
                )
            )
