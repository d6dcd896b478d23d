"""The replay of one partition, in any process: it goes on where the last one stopped, and says the same.

Outputs are taken and written down at offsets that the log alone determines, so that a replay that was killed leaves the
same bytes as one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from probe_consumers.decoding import Decoder
from probe_consumers.replay import Replay
from probe_consumers.replay_order import Part, Plan, check_probes, read_plan
from probe_consumers.replay_source import load, source_of, versions_of
from probe_consumers.replay_store import Checkpoint, PartStore, part_folder
from undercurrent.errors import ReplayError
from undercurrent.kafka.records import Record
from undercurrent.protocol.host_events import Incoming
from undercurrent.service.processes import keep_freed_memory
from undercurrent.subjects import codec_of

STEP_BYTES = 16 << 20
"""Outputs are written after so many bytes of records, or so many records."""
STEP_RECORDS = 16_384
KEPT_BYTES = 64 << 20
"""Memory that is freed between batches and not given back."""

Watcher = Callable[[], None]


def replay_part(out: Path, number: int, watch: Watcher) -> None:
    """Replay one partition of the plan in a folder, from where it stands to its end.

    Args:
        out: the folder.
        number: of the partition.
        watch: called whenever something was written.

    Raises:
        ReplayError: the log no longer has what was still to be read, the probes have changed, or another process writes
            there.
    """
    plan = read_plan(out)
    if plan is None:
        raise ReplayError(f"{out}: there is no plan of a replay")
    part = next(part for part in plan.parts if part.number == number)
    keep_freed_memory(KEPT_BYTES)
    with PartStore(part_folder(out, number), part.span.start) as store:
        if not store.checkpoint.done:
            _PartRun(plan, part, store, watch).run()


class PassedOver:
    """Adds the bytes of records that are left out to the next one that is not: a live host counts them all."""

    def __init__(self) -> None:
        self._bytes = 0

    def counted(self, records: Sequence[Record], kept: Sequence[Incoming]) -> list[Incoming]:
        """Return those that were kept.

        Args:
            records: of one partition, all that there are.
            kept: some of them, decoded.
        """
        counted: list[Incoming] = []
        for record in records:
            if len(counted) < len(kept) and kept[len(counted)].offset == record.offset:
                counted.append(kept[len(counted)]._replace(before=self._bytes))
                self._bytes = 0
            else:
                self._bytes += len(record.value or b"")
        return counted


class _PartRun:
    """Goes through the records of a part.

    Args:
        plan: of the replay.
        part: which partition.
        store: where its outputs go.
        watch: called whenever something was written.
    """

    def __init__(self, plan: Plan, part: Part, store: PartStore, watch: Watcher) -> None:
        self._point = str(plan.asked["point"])
        loaded = load(plan.origins)
        bounds = loaded.of_point(self._point)
        check_probes(plan, bounds)
        self._source = source_of(plan.origins, loaded, self._point)
        self._wanted = None if plan.requests is None else frozenset(name.encode() for name in plan.requests)
        self._part, self._store, self._watch = part, store, watch
        self._start = store.checkpoint
        marks = {part.number: self._start.mark}
        versions = versions_of(plan.origins, loaded, self._point)
        host = loaded.config.host if loaded.config is not None and plan.origins.dataset is None else None
        limit = None if host is None else host.max_replay_kb << 10
        self._replay = Replay(self._point, bounds, {part.number: part.span}, _no_clock, marks, versions, limit)
        self._passed_over = PassedOver()
        self._decoder = Decoder(None if loaded.config is None else codec_of(loaded.config.kafka))
        # What lies below the checkpoint is only read again, to know what was open there.
        self._rebuilds = self._start.low < self._start.position
        self._size = self._count = 0  # of records since outputs were last taken
        self._read = self._skipped = self._bytes = 0  # since the checkpoint

    def run(self) -> None:
        """Read, judge and write to the end of the part."""
        first = self._start.low
        for records in self._source.batches(self._part, first) if first < self._part.span.end else ():
            at = 0
            while at < len(records):
                if self._rebuilds and records[at].offset >= self._start.position:
                    self._step(self._start.position)
                    self._rebuilds = False
                stop = self._cut(records, at)
                self._take(records[at:stop])
                at = stop
                if self._size >= STEP_BYTES or self._count >= STEP_RECORDS:
                    self._step(records[stop - 1].offset + 1)
        self._rebuilds = False
        self._step(self._part.span.end, done=True)

    def _cut(self, records: Sequence[Record], at: int) -> int:
        """Return up to where records are taken before outputs are due, at the latest where the checkpoint is."""
        for number in range(at, len(records)):
            if self._rebuilds and records[number].offset >= self._start.position:
                return number
            self._size += len(records[number].value or b"")
            self._count += 1
            if self._size >= STEP_BYTES or self._count >= STEP_RECORDS:
                return number + 1
        return len(records)

    def _take(self, records: Sequence[Record]) -> None:
        # What an engine's publisher writes to every partition has no key: it closes streams.
        wanted = self._wanted
        kept = records if wanted is None else [item for item in records if not item.key or item.key in wanted]
        if wanted is None:
            self._replay.take(self._decoder.batch(kept))
        else:
            found = [self._decoder.incoming(record) for record in kept]
            self._replay.take(self._passed_over.counted(records, found))
        if not self._rebuilds:
            self._read += len(records)
            self._skipped += len(records) - len(kept)
            self._bytes += sum(len(item.value or b"") for item in records)

    def _step(self, position: int, *, done: bool = False) -> None:
        """Take the outputs, and write them down where no earlier process has."""
        verdicts, left_out = self._replay.outputs(), self._replay.take_left_out()
        self._size = self._count = 0
        if self._rebuilds:
            return
        start = self._start
        reached = Checkpoint(
            low=self._replay.mark(self._part.number).low,
            position=max(position, start.position),
            records=start.records + self._read,
            skipped=start.skipped + self._skipped,
            read_bytes=start.read_bytes + self._bytes,
            unfinished=tuple(sorted(self._replay.unfinished())) if done else (),
            done=done,
        )
        self._store.commit(verdicts, left_out, reached)
        self._watch()


def _no_clock() -> int:
    """Return 0: when a replay ran is no part of what it says."""
    return 0
