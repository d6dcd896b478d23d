"""The replay of one partition, in any process: it goes on where the last one stopped, and says the same.

Outputs are taken and written down at offsets that the log alone determines, so that a replay that was killed leaves the
same bytes as one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from probe_consumers.decoding import Decoder
from probe_consumers.replay import Joining, Mark, Replay, Span
from probe_consumers.replay_merging import merged
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


def replay_parts(out: Path, numbers: Sequence[int], watch: Watcher) -> None:
    """Replay partition numbers of the plan in a folder, one after the other, each from where it stands to its end.

    Args:
        out: the folder.
        numbers: of the partitions; where points are joined, each is of one of each topic.
        watch: called whenever something was written.

    Raises:
        ReplayError: the log no longer has what was still to be read, the probes have changed, or another process writes
            there.
    """
    plan = read_plan(out)
    if plan is None:
        raise ReplayError(f"{out}: there is no plan of a replay")
    keep_freed_memory(KEPT_BYTES)
    probes: _Probes | None = None
    for number in numbers:
        firsts = [part.span.start for part in plan.parts_of(number)]
        with PartStore(part_folder(out, number), firsts) as store:
            if not store.checkpoint.done:
                probes = probes or _Probes(plan)
                _PartRun(plan, number, store, watch, probes).run()


class _Probes:
    """What runs on every part of a replay, loaded once in a process.

    Args:
        plan: of the replay.

    Raises:
        ReplayError: the probes have changed.
    """

    def __init__(self, plan: Plan) -> None:
        self.point = str(plan.asked["point"])
        self.loaded = load(plan.origins)
        self.bounds = self.loaded.of_point(self.point)
        check_probes(plan, self.bounds)
        self.versions = versions_of(plan.origins, self.loaded, self.point)


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
    """Goes through the records of a partition number.

    Args:
        plan: of the replay.
        number: which one.
        store: where its outputs go.
        watch: called whenever something was written.
        probes: that run.
    """

    def __init__(self, plan: Plan, number: int, store: PartStore, watch: Watcher, probes: _Probes) -> None:
        loaded = probes.loaded
        self._inputs, self._parts = plan.inputs, plan.parts_of(number)
        self._sources = [source_of(plan.origins, loaded, name) for name in self._inputs.points]
        wanted = None if plan.requests is None else frozenset(plan.requests)
        self._wanted = None if wanted is None else frozenset(name.encode() for name in wanted)
        self._store, self._watch = store, watch
        self._start = store.checkpoint
        lanes = [part.number for part in self._parts]
        self._marks = dict(zip(lanes, self._start.marks, strict=True))
        self._positions = {lane: mark.low for lane, mark in self._marks.items()}
        self._ends = {part.number: part.span.end for part in self._parts}
        host = loaded.config.host if loaded.config is not None and plan.origins.dataset is None else None
        limit = None if host is None else host.max_replay_kb << 10
        spans = {part.number: part.span for part in self._parts}
        joining = None
        if self._inputs.joined:
            joining = Joining(inputs=self._inputs, begins_us=_begins_us(self._parts), wanted=wanted)
        self._replay = Replay(
            probes.point, probes.bounds, spans, _no_clock, self._marks, probes.versions, limit, joining
        )
        self._passed_over = PassedOver()
        self._decoder = Decoder(None if loaded.config is None else codec_of(loaded.config.kafka))
        self._rebuilds = False
        self._size = self._count = 0  # of records since outputs were last taken
        self._read = self._skipped = self._bytes = 0  # since the checkpoint

    def run(self) -> None:
        """Read, judge and write to the end of the part."""
        positions = {lane: mark.position for lane, mark in self._marks.items()}
        if any(mark.low < mark.position for mark in self._marks.values()):
            # What lies below the checkpoint is only read again, to know what was open there.
            self._rebuilds = True
            self._go(positions, whole=True)
            self._replay.come_to(self._marks)
            self._step()
            self._rebuilds = False
        self._positions = positions
        self._go(self._ends, whole=False)
        self._replay.end()
        self._step(done=True)

    def _go(self, ends: Mapping[int, int], *, whole: bool) -> None:
        """Take records up to some offsets.

        Args:
            ends: by lane.
            whole: also those that nothing can join them with.
        """
        for records in self._batches(ends, whole=whole):
            at = 0
            while at < len(records):
                stop = self._cut(records, at)
                self._take(records[at:stop])
                at = stop
                if self._size >= STEP_BYTES or self._count >= STEP_RECORDS:
                    self._step()

    def _batches(self, ends: Mapping[int, int], *, whole: bool) -> Iterator[Sequence[Record]]:
        feeds = {}
        for source, part in zip(self._sources, self._parts, strict=True):
            lane, first = part.number, self._positions[part.number]
            if first < ends[lane]:
                span = Span(part.span.start, ends[lane])
                feeds[lane] = source.batches(replace(part, number=self._inputs.lanes.number(lane), span=span), first)
        if not self._inputs.joined:
            return feeds.popitem()[1] if feeds else iter(())
        laned = {lane: map(self._inputs.laned, feed) for lane, feed in feeds.items()}
        return merged(laned, frozenset if whole else lambda: self._replay.ahead)

    def _cut(self, records: Sequence[Record], at: int) -> int:
        """Return up to where records are taken before outputs are due."""
        if self._inputs.joined:
            # Lanes are merged anew behind each step: one in the middle of what was merged would change what comes next.
            self._size += sum(len(record.value or b"") for record in records)
            self._count += len(records)
            return len(records)
        for number in range(at, len(records)):
            self._size += len(records[number].value or b"")
            self._count += 1
            if self._size >= STEP_BYTES or self._count >= STEP_RECORDS:
                return number + 1
        return len(records)

    def _take(self, records: Sequence[Record]) -> None:
        # What an engine's publisher writes to every partition has no key: it closes streams.
        wanted = self._wanted
        kept = records if wanted is None else [item for item in records if not item.key or item.key in wanted]
        if self._inputs.joined:
            self._replay.take([self._decoder.incoming(record) for record in records])
        elif wanted is None:
            self._replay.take(self._decoder.batch(kept))
        else:
            found = [self._decoder.incoming(record) for record in kept]
            self._replay.take(self._passed_over.counted(records, found))
        of_lanes = records if self._inputs.joined else records[-1:]
        self._positions.update((record.partition, record.offset + 1) for record in of_lanes)
        if not self._rebuilds:
            self._read += len(records)
            self._skipped += len(records) - len(kept)
            self._bytes += sum(len(item.value or b"") for item in records)

    def _step(self, *, done: bool = False) -> None:
        """Take the outputs, and write them down where no earlier process has."""
        verdicts, left_out = self._replay.outputs(), self._replay.take_left_out()
        self._size = self._count = 0
        if self._rebuilds:
            return
        start = self._start
        mark, *others = (self._reached(lane, done=done) for lane in self._marks)
        reached = Checkpoint(
            low=mark.low,
            position=mark.position,
            others=tuple(others),
            records=start.records + self._read,
            skipped=start.skipped + self._skipped,
            read_bytes=start.read_bytes + self._bytes,
            unfinished=tuple(sorted(self._replay.unfinished().items())) if done else (),
            done=done,
        )
        self._store.commit(verdicts, left_out, reached, self._replay.other_offsets)
        self._watch()

    def _reached(self, lane: int, *, done: bool) -> Mark:
        """Return how far a lane has come."""
        position = max(self._positions[lane], self._marks[lane].position)
        if done and lane not in self._replay.ahead:
            position = self._ends[lane]
        return Mark(self._replay.mark(lane).low, position)


def _begins_us(parts: Sequence[Part]) -> dict[int, int | None]:
    begins_ms = {part.number: part.begins_ms for part in parts if part.span.start > 0}
    return {lane: None if at_ms is None else 1000 * at_ms for lane, at_ms in begins_ms.items()}


def _no_clock() -> int:
    """Return 0: when a replay ran is no part of what it says."""
    return 0
