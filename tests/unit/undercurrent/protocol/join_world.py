"""Hosts that read the lanes of several points under fire, and what they write."""

from __future__ import annotations

import random
import struct
from collections import Counter

from tests.unit.undercurrent.protocol.join_plain import Plain
from tests.unit.undercurrent.protocol.join_story import POINTS, Story, wide_row
from undercurrent.codec.tensors import row_bytes, rows_of
from undercurrent.protocol.host_events import Commit, Emission, Fetch, Incoming, Read
from undercurrent.protocol.host_position import Committed, resume_from
from undercurrent.protocol.join_runner import JoinRunner
from undercurrent.protocol.joined_stream import RowFormat
from undercurrent.protocol.joining_host import JoiningHost
from undercurrent.protocol.lanes import Lanes
from undercurrent.protocol.messages import BindingMode, ProbeVerdict, VerdictAction, VerdictKind
from undercurrent.protocol.streams import Arrived, Closed, Opened, Withheld

ROWS = RowFormat(row_bytes, rows_of)
FINGERPRINT = "f" * 64


class RowsRunner:
    """A probe that keeps every row that it sees, signals at the third, and says all of it."""

    def __init__(self):
        self.runs = {}

    def process(self, steps):
        for step in steps:
            key = step.partition, step.event.stream.id
            match step.event:
                case Opened(stream=stream):
                    self.runs[key] = [0, [], stream, step.offset, False]
                case Withheld(event=inner, place=place):
                    if isinstance(inner, Opened):
                        self.runs[key] = [0, [], inner.stream, step.offset, False]
                    run = self.runs[key]
                    yield from self._rows(step.partition, run)
                    if not run[4]:
                        yield self._said(run, step, VerdictKind.ERROR, error=place)
                    run[4] = True
                    if isinstance(inner, Closed):
                        del self.runs[key]
                case Arrived() if not self.runs[key][4]:
                    yield from self._arrived(self.runs[key], step)
                case Closed(stream=stream):
                    run = self.runs.pop(key)
                    if run[4]:
                        continue
                    yield from self._rows(step.partition, run)
                    yield self._said(
                        run,
                        step,
                        VerdictKind.RESULT,
                        scored=run[0],
                        missing=stream.missing,
                        complete=stream.complete,
                        end_reason=stream.end_reason,
                        clear_up_to=stream.clear_up_to,
                    )

    def _arrived(self, run, step):
        block = step.event.block
        count = len(block.positions) // 4
        wide = len(block.data) // count
        for at, position in enumerate(struct.unpack(f"<{count}i", block.positions)):
            run[0] += 1
            if not step.silent:
                run[1].append((position, block.data[wide * at : wide * (at + 1)]))
            if run[0] == 3:
                yield self._said(run, step, VerdictKind.SIGNAL, token_pos=position)
        run[3] = step.offset

    def _said(self, run, step, kind, **fields):
        verdict = self._verdict(run, step.partition, step.offset, kind, **fields)
        return Emission(verdict=verdict, timestamp_us=step.timestamp_us, silent=step.silent)

    def _verdict(self, run, partition, offset, kind, **fields):
        stream = run[2]
        return ProbeVerdict(
            request_id=stream.id.request_id,
            attempt=stream.id.attempt,
            index=stream.id.index,
            point=stream.started.point,
            probe="probe",
            service="s",
            kind=kind,
            mode=BindingMode.SHADOW,
            action=VerdictAction.CONTINUE,
            source_partition=partition,
            source_offset=offset,
            decided_at_us=0,
            **fields,
        )

    def _rows(self, partition, run):
        if run[1]:
            rows, run[1] = run[1], []
            data = b"".join(data for _, data in rows)
            places = struct.pack(f"<{len(rows)}i", *(position for position, _ in rows))
            yield Emission(
                verdict=self._verdict(
                    run, partition, run[3], VerdictKind.WATERMARK, score_positions=places, scores=data
                )
            )

    def watermarks(self, partition):
        for key, run in self.runs.items():
            if key[0] == partition:
                yield from (emission.verdict for emission in self._rows(partition, run))

    def forget(self, partition):
        self.runs = {key: run for key, run in self.runs.items() if key[0] != partition}


class Fleet:
    """Two members that read lanes in any order, die after any action, and take lanes from one another."""

    def __init__(self, rng, points, logs, numbers, *, keeping=None, runner=RowsRunner):
        self.rng, self.points, self.keeping, self.runner = rng, points, keeping, runner
        self.lanes = Lanes(points, numbers)
        self.logs = {self.lanes.lane(point, number): log for (point, number), log in logs.items()}
        self.visible = dict.fromkeys(self.logs, 0)
        self.committed = {}
        self.verdicts, self.dead = [], {lane: Counter() for lane in self.logs}
        self.states = {lane: {} for lane in self.logs}
        self.members = [self.member(), self.member()]
        self.owner = dict.fromkeys(self.logs, 0)
        self.lows = []
        self.give(sorted(self.logs), 0)

    def member(self):
        joins = JoinRunner(self.runner(), self.lanes, self.points, ROWS)
        host = JoiningHost(self.points, FINGERPRINT, joins, self.lanes, 1, keeping=self.keeping, ahead_bytes=200)
        return [host, {}]

    def give(self, lanes, index):
        for lane in lanes:
            self.owner[lane] = index
        self.act(self.members[index], self.members[index][0].assign(lanes))

    def act(self, member, actions):
        for action in actions:
            match action:
                case Fetch(partition=lane):
                    end = len(self.logs[lane])
                    resume = resume_from(self.committed.get(lane), 0, end, FINGERPRINT, "earliest")
                    states = list(self.states[lane].values()) if resume.states else []
                    self.act(member, member[0].begin(lane, resume, states))
                case Read(partition=lane, offset=offset):
                    member[1][lane] = offset
                case Commit():
                    self.write(member)

    def write(self, member):
        transaction = member[0].transaction()
        self.verdicts += transaction.verdicts
        for letter in transaction.dead_letters:
            self.dead[letter.partition][letter.offset] += 1
        for key, state in transaction.states.items():
            self.states[key.partition][key.stream] = state
            if state is None:
                del self.states[key.partition][key.stream]
        for lane, (offset, text) in transaction.offsets.items():
            before = self.committed.get(lane)
            assert before is None or offset >= before.offset, "what was committed never goes back"
            self.committed[lane] = Committed(offset=offset, metadata=text)
        self.lows.append({lane: item.offset for lane, item in self.committed.items()})

    def read(self, index, lane, limit):
        member = self.members[index]
        host, places = member
        if lane in host.emitted_up_to and lane not in host.ahead:
            first = places[lane]
            last = min(self.visible[lane], first + limit)
            log = self.logs[lane]
            batch = [Incoming(lane, at, log[at][0], log[at][1], size=100) for at in range(first, last)]
            places[lane] = last
            self.take(index, batch)

    def take(self, index, batch):
        self.act(self.members[index], self.members[index][0].records(batch, 0))

    def crash(self, index):
        self.members[index] = self.member()
        self.give(sorted(lane for lane, owner in self.owner.items() if owner == index), index)

    def fail(self, index):
        self.members[index][0].transaction()
        self.act(self.members[index], self.members[index][0].failed())

    def rebalance(self, lanes):
        for lane in lanes:
            old = self.owner[lane]
            self.members[old][0].revoke([lane])
            self.give([lane], 1 - old)

    def under_fire(self, steps):
        for _ in range(steps):
            lane = self.rng.choice(sorted(self.logs))
            index = self.owner[lane]
            roll = self.rng.random()
            self.visible[lane] = min(len(self.logs[lane]), self.visible[lane] + self.rng.randint(0, 8))
            if roll < 0.68:
                self.read(index, lane, self.rng.randint(1, 12))
            elif roll < 0.9:
                self.write(self.members[index])
            elif roll < 0.95:
                self.crash(index)
            elif roll < 0.97:
                self.fail(index)
            elif roll < 0.985:
                self.rebalance([lane])
            else:
                self.rebalance(self.lanes.of(self.lanes.number(lane)))

    def to_the_end(self, *, all_end=True):
        for number in range(self.lanes.partitions):
            mine = self.lanes.of(number)
            self.rebalance([lane for lane in mine if self.owner[lane] != self.owner[mine[0]]])
        self.visible = {lane: len(log) for lane, log in self.logs.items()}
        for _ in range(200):
            for lane in self.rng.sample(sorted(self.logs), len(self.logs)):
                self.read(self.owner[lane], lane, self.rng.choice([3, 50]))
        for member in self.members:
            self.write(member)
        at_end = [self.members[self.owner[lane]][1][lane] == len(log) for lane, log in self.logs.items()]
        assert all(at_end), "every lane was read to its end"
        for lane, log in self.logs.items() if all_end else ():
            assert self.committed[lane].offset == len(log) - 1, "nothing holds a lane back, once all has ended"


def read_outputs(verdicts):
    """Return (signals, results, rows by request), however rows were cut into watermarks."""
    signals, results, rows = Counter(), Counter(), {}
    for item in verdicts:
        name = (item.request_id, item.attempt, item.index)
        if item.kind is VerdictKind.SIGNAL:
            signals[name, item.source_offset, item.token_pos] += 1
        elif item.kind is VerdictKind.RESULT:
            fields = (item.scored, item.missing, item.complete, item.end_reason, item.clear_up_to)
            results[name, item.source_offset, *fields] += 1
        elif item.kind is VerdictKind.WATERMARK:
            count = len(item.score_positions) // 4
            wide = len(item.scores) // count
            for at, position in enumerate(struct.unpack(f"<{count}i", item.score_positions)):
                rows.setdefault(name, []).append((position, item.scores[wide * at : wide * (at + 1)]))
    return signals, results, rows


def check(fleet, points, story):
    """Compare what the hosts wrote with what must follow."""
    for number in range(story.numbers):
        plain = Plain(points, [story.logs[point, number] for point in points])
        mine = [item for item in fleet.verdicts if item.source_partition == number]
        signals, results, rows = read_outputs(mine)
        assert results == plain.results, (results - plain.results, plain.results - results)
        assert signals == plain.signals, (signals - plain.signals, plain.signals - signals)
        assert rows == {
            name: [(at, wide_row(points, at)) for at in places] for name, places in plain.rows.items() if places
        }
        lanes = fleet.lanes.of(number)
        for lane, one in zip(lanes, plain.lanes, strict=True):
            assert fleet.dead[lane] == +one.dead
        for lows in fleet.lows:
            for place in plain.places:
                known = [at >= lows.get(lane, 0) for lane, (at, _) in zip(lanes, place, strict=True)]
                asks = any(there and real for there, (_, real) in zip(known, place, strict=True))
                assert all(known) or not asks, f"{place} is known at one point alone to whoever begins at {lows}"


def run(seed, points=2, numbers=1, steps=60, fire=250, **options):
    rng = random.Random(seed)
    names = POINTS[:points]
    story = Story(rng, names, numbers, steps)
    fleet = Fleet(rng, names, story.logs, numbers, **options)
    fleet.under_fire(fire)
    fleet.to_the_end()
    check(fleet, names, story)
    return fleet, story
