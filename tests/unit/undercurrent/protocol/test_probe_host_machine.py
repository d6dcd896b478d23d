"""A state machine that crashes probe hosts after any action and compares what they wrote with a plain oracle."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Commit, Emission, Fetch, Incoming, Read, SendAbort
from undercurrent.protocol.host_position import Committed, resume_from
from undercurrent.protocol.messages import (
    ActivationBlock,
    BindingMode,
    CommandKind,
    CommandSource,
    ControlCommand,
    EndReason,
    ProbeVerdict,
    PublisherStarted,
    StreamEnded,
    StreamStarted,
    VerdictAction,
    VerdictKind,
)
from undercurrent.protocol.streams import Arrived, Closed, Opened

POINT = "p"
PARTITIONS = (0, 1)
FINGERPRINT = "f" * 64


def started(request, attempt, engine="e", incarnation=1, shard=0, shards=1, seq=0):
    return StreamStarted(
        request_id=request,
        attempt=attempt,
        point=POINT,
        shard=shard,
        shards=shards,
        engine=engine,
        incarnation=incarnation,
        seq=seq,
        prompt_len=1,
        model="m",
        tensor_type="residual_stream",
        layers=(shard,),
        width=1,
        dtype="float32",
        point_hash="",
        started_at_us=0,
    )


def block(request, attempt, position, seq, engine="e", incarnation=1, shard=0):
    return ActivationBlock(
        request_id=request,
        attempt=attempt,
        point=POINT,
        shard=shard,
        engine=engine,
        incarnation=incarnation,
        tensor_type="residual_stream",
        dtype="float32",
        width=1,
        layers=(shard,),
        seq=seq,
        step=0,
        captured_at_us=0,
        positions=struct.pack("<i", position),
        token_ids=b"",
        data=struct.pack("<f", position),
    )


def ended(request, attempt, seq, engine="e", incarnation=1, shard=0, reason=EndReason.FINISHED):
    return StreamEnded(
        request_id=request,
        attempt=attempt,
        point=POINT,
        shard=shard,
        engine=engine,
        incarnation=incarnation,
        seq=seq,
        last_seq=max(0, seq - 1),
        last_pos=-1,
        layers=(shard,),
        emitted=(0,),
        dropped=(0,),
        reason=reason,
        ended_at_us=0,
    )


def verdict(stream, partition, offset, kind, **fields):
    return ProbeVerdict(
        request_id=stream.id.request_id,
        attempt=stream.id.attempt,
        index=stream.id.index,
        point=POINT,
        probe="probe",
        service="s",
        kind=kind,
        mode=BindingMode.ABORT,
        action=fields.pop("action", VerdictAction.CONTINUE),
        source_partition=partition,
        source_offset=offset,
        decided_at_us=0,
        **fields,
    )


class CountingRunner:
    """A probe that sums positions and aborts at the third record: its state shows every record lost or doubled."""

    def __init__(self):
        self.runs = {}

    def process(self, steps):
        for step in steps:
            key = (step.partition, step.event.stream.id)
            match step.event:
                case Opened(stream=stream):
                    self.runs[key] = [0, 0, [], stream, -1, step.offset]
                case Arrived(block=item, clear_up_to=clear):
                    yield from self._arrived(self.runs[key], step, item, clear)
                case Closed(stream=stream):
                    run = self.runs.pop(key)
                    yield from self._watermark(step.partition, run)
                    yield Emission(
                        verdict=verdict(
                            stream,
                            step.partition,
                            step.offset,
                            VerdictKind.RESULT,
                            score=float(run[1]),
                            scored=run[0],
                            missing=stream.missing,
                            complete=stream.complete,
                            end_reason=stream.end_reason,
                        )
                    )

    def _arrived(self, run, step, item, clear):
        position = struct.unpack("<i", item.positions)[0]
        run[0] += 1
        run[1] += position
        run[4], run[5] = clear, step.offset
        if not step.silent:
            run[2].append(position)
        if run[0] == 3:
            name = f"{item.request_id}/{item.attempt}/{step.offset}"
            command = ControlCommand(
                command_id=name,
                kind=CommandKind.ABORT,
                request_id=item.request_id,
                source=CommandSource.PROBE,
                issued_at_us=0,
            )
            said = verdict(
                run[3],
                step.partition,
                step.offset,
                VerdictKind.SIGNAL,
                action=VerdictAction.ABORT,
                token_pos=position,
                command_id=name,
            )
            yield Emission(verdict=said, command=command, timestamp_us=step.timestamp_us)

    def _watermark(self, partition, run):
        if run[2]:
            data = struct.pack(f"<{len(run[2])}i", *run[2])
            run[2] = []
            yield Emission(
                verdict=verdict(
                    run[3], partition, run[5], VerdictKind.WATERMARK, score_positions=data, clear_up_to=run[4]
                )
            )

    def watermarks(self, partition):
        for key, run in self.runs.items():
            if key[0] == partition:
                yield from (emission.verdict for emission in self._watermark(partition, run))

    def forget(self, partition):
        self.runs = {key: run for key, run in self.runs.items() if key[0] != partition}


@dataclass
class Member:
    host: ProbeHost
    fetch_from: dict[int, int] = field(default_factory=dict)
    jumped: set[tuple[int, int]] = field(default_factory=set)


def read_outputs(verdicts):
    """Return (signals, results, scores) in a form that does not depend on how scores were cut into watermarks."""
    signals, results, scores = Counter(), Counter(), {}
    for item in verdicts:
        name = (item.request_id, item.attempt, item.index)
        if item.kind is VerdictKind.SIGNAL:
            signals[*name, item.source_offset, item.token_pos, item.command_id] += 1
        elif item.kind is VerdictKind.RESULT:
            results[
                *name, item.source_offset, item.score, item.scored, item.missing, item.complete, item.end_reason
            ] += 1
        else:
            count = len(item.score_positions) // 4
            scores.setdefault(name, []).extend(struct.unpack(f"<{count}i", item.score_positions))
    return signals, results, scores


class PlainReader:
    """Reads one partition once, from its start, in the plainest way."""

    def __init__(self, log):
        self.signals, self.results, self.dead, self.scores = Counter(), Counter(), Counter(), {}
        # Open ones: request, attempt, wanted shards, {shard: writer, next, started, ended}, count, total, missing.
        self.streams = []
        for offset, message in enumerate(log):
            if message is None:
                self.dead[offset] += 1
            elif isinstance(message, PublisherStarted):
                for stream in list(self.streams):
                    writers = [shard["writer"] for shard in stream["shards"].values()]
                    if any(engine == message.engine and number < message.incarnation for engine, number in writers):
                        self.close(stream, offset, "lost", own_ends=False)
            else:
                self.take(offset, message)

    def take(self, offset, message):
        same = [stream for stream in self.streams if stream["request"] == message.request_id]
        own = next((stream for stream in same if stream["attempt"] == message.attempt), None)
        impossible = isinstance(message, StreamStarted) and message.shard >= message.shards
        if impossible or (own is not None and message.shard >= own["wanted"]):
            self.dead[offset] += 1
        elif isinstance(message, StreamStarted):
            self.start(offset, message, same, own)
        elif isinstance(message, ActivationBlock):
            self.block(offset, message, own)
        elif own is not None:
            self.end(offset, message, own)

    def start(self, offset, message, same, own):
        stale = any(stream["attempt"] > message.attempt for stream in same)
        if stale or (own is not None and message.shard in own["shards"]):
            self.dead[offset] += 1
            return
        if own is None:
            for stream in same:
                self.close(stream, offset, "superseded", own_ends=False)
            own = {"request": message.request_id, "attempt": message.attempt, "wanted": message.shards, "shards": {}}
            own |= {"count": 0, "total": 0, "missing": 0}
            self.streams.append(own)
        shard = self.shard(own, message)
        shard["started"], shard["next"] = True, message.seq + 1
        own["missing"] += message.seq

    def block(self, offset, message, own):
        shard = self.shard(own, message) if own else None
        writer = (message.engine, message.incarnation)
        if shard is None or shard["writer"] != writer or shard["ended"] or message.seq < shard["next"]:
            self.dead[offset] += 1
            return
        own["missing"] += message.seq - shard["next"]
        shard["next"] = message.seq + 1
        position = struct.unpack("<i", message.positions)[0]
        own["count"] += 1
        own["total"] += position
        self.scores.setdefault((message.request_id, message.attempt, 0), []).append(position)
        if own["count"] == 3:
            name = f"{message.request_id}/{message.attempt}/{offset}"
            self.signals[message.request_id, message.attempt, 0, offset, position, name] += 1

    def end(self, offset, message, own):
        shard = self.shard(own, message)
        if shard["ended"]:
            return
        shard["ended"] = True
        if message.reason is EndReason.LOST:
            self.close(own, offset, "lost", own_ends=False)
            return
        own["missing"] += max(0, message.seq - shard["next"])
        if sum(shard["ended"] for shard in own["shards"].values()) >= own["wanted"]:
            self.close(own, offset, "finished", own_ends=True)

    def shard(self, own, message):
        fresh = {"writer": (message.engine, message.incarnation), "next": 0, "started": False, "ended": False}
        return own["shards"].setdefault(message.shard, fresh)

    def close(self, stream, offset, reason, *, own_ends):
        self.streams.remove(stream)
        all_started = sum(shard["started"] for shard in stream["shards"].values()) >= stream["wanted"]
        complete = own_ends and all_started and stream["missing"] == 0
        words = (float(stream["total"]), stream["count"], stream["missing"], complete, reason)
        self.results[stream["request"], stream["attempt"], 0, offset, *words] += 1


class HostsUnderFire(RuleBasedStateMachine):
    """Two members over two partitions; each rule is one action, and a crash may follow any of them."""

    def __init__(self):
        super().__init__()
        self.logs = {number: [] for number in PARTITIONS}
        self.committed = {}
        self.verdicts = []
        self.dead = {number: Counter() for number in PARTITIONS}
        self.aborts = []
        self.covered = set()
        self.seqs = {}
        self.incarnation = 1

    @initialize()
    def start(self):
        self.members = [self.new_member(), self.new_member()]
        self.owner = {}
        for number in PARTITIONS:
            self.give(number, number)

    # --- the writers

    partition = st.sampled_from(PARTITIONS)
    request = st.sampled_from(["a", "b", "c"])
    attempt = st.integers(1, 3)
    shard = st.sampled_from([0, 0, 0, 1])
    member = st.sampled_from([0, 1])

    def next_seq(self, partition, request, attempt, shard, skip):
        key = (partition, request, attempt, shard)
        seq = self.seqs.get(key, 0) + skip
        self.seqs[key] = seq + 1
        return max(0, seq)

    @rule(partition=partition, request=request, attempt=attempt, shards=st.sampled_from([1, 1, 2]), shard=shard)
    def append_start(self, partition, request, attempt, shards, shard):
        self.seqs[partition, request, attempt, shard] = 1
        message = started(request, attempt, shards=shards, shard=shard, incarnation=self.incarnation)
        self.logs[partition].append(message)

    @rule(
        partition=partition,
        request=request,
        attempt=attempt,
        shard=shard,
        skip=st.sampled_from([0, 0, 0, 0, 1, 2, -1]),
        late=st.sampled_from([0, 0, 0, 1]),
        count=st.integers(1, 4),
    )
    def append_blocks(self, partition, request, attempt, shard, skip, late, count):
        for _ in range(count):
            seq = self.next_seq(partition, request, attempt, shard, skip)
            incarnation = max(1, self.incarnation - late)
            message = block(request, attempt, len(self.logs[partition]), seq, shard=shard, incarnation=incarnation)
            self.logs[partition].append(message)

    @rule(
        partition=partition,
        request=request,
        attempt=attempt,
        shard=shard,
        reason=st.sampled_from([EndReason.FINISHED, EndReason.FINISHED, EndReason.LOST]),
    )
    def append_end(self, partition, request, attempt, shard, reason):
        seq = self.next_seq(partition, request, attempt, shard, 0)
        self.logs[partition].append(
            ended(request, attempt, seq, shard=shard, reason=reason, incarnation=self.incarnation)
        )

    @rule(partition=partition, names=st.permutations(["a", "b", "c"]), stale=st.booleans(), recovers=st.booleans())
    def append_dependent_start(self, partition, names, stale, recovers):
        """A start that means something else to a reader who does not know an older stream, closed since."""
        first, other, _ = names
        self.append_start(partition, first, 3, shards=1 if stale else 2, shard=0)
        self.append_start(partition, other, 3, shards=1, shard=0)
        self.append_start(partition, first, 2 if stale else 3, shards=1 if stale else 2, shard=0 if stale else 1)
        for shard in (0,) if stale else (0, 1):
            self.append_end(partition, first, 3, shard, EndReason.FINISHED)
        if recovers:
            self.recover(self.owner[partition], 1000)
            self.append_blocks(partition, first, 2 if stale else 3, shard=0, skip=0, late=0, count=1)

    @rule(partition=partition)
    def append_poison(self, partition):
        self.logs[partition].append(None)

    @rule()
    def restart_engine(self):
        self.incarnation += 1
        for number in PARTITIONS:
            self.logs[number].append(PublisherStarted(engine="e", incarnation=self.incarnation, started_at_us=0))

    # --- the hosts

    def new_member(self):
        return Member(ProbeHost(POINT, FINGERPRINT, CountingRunner(), abort_max_age_us=10**12))

    def give(self, partition, index):
        self.owner[partition] = index
        self.act(self.members[index], self.members[index].host.assign([partition]))

    def act(self, member, actions):
        for action in actions:
            match action:
                case Fetch(partition=number):
                    resume = resume_from(self.committed.get(number), 0, len(self.logs[number]), FINGERPRINT, "earliest")
                    self.act(member, member.host.begin(number, resume))
                case Read(partition=number, offset=offset):
                    member.fetch_from[number] = offset
                case SendAbort(command=command):
                    self.aborts.append(command.command_id)
                case Commit():
                    self.write(member)

    def write(self, member):
        transaction = member.host.transaction()
        self.verdicts.extend(transaction.verdicts)
        for letter in transaction.dead_letters:
            self.dead[letter.partition][letter.offset] += 1
        for number, (offset, metadata) in transaction.offsets.items():
            assert self.owner[number] == self.members.index(member)
            self.committed[number] = Committed(offset=offset, metadata=metadata)
        self.covered.update(item.command_id for item in transaction.verdicts if item.command_id)

    def poll(self, member, limit):
        batch = []
        for number in sorted(member.host.emitted_up_to):
            start = member.fetch_from[number]
            for offset in range(start, min(start + limit, len(self.logs[number]))):
                message = self.logs[number][offset]
                batch.append(Incoming(partition=number, offset=offset, timestamp_us=0, message=message, error="bad"))
            member.fetch_from[number] = max(start, min(start + limit, len(self.logs[number])))
        self.act(member, member.host.records(batch, now_us=0))

    @rule(index=member, limit=st.integers(1, 5))
    def read(self, index, limit):
        self.poll(self.members[index], limit)

    @rule(index=member)
    def commit(self, index):
        self.write(self.members[index])

    @rule(index=member)
    def crash(self, index):
        """All that was not written is gone; another process takes the same partitions."""
        self.members[index] = self.new_member()
        for number in [number for number, owner in self.owner.items() if owner == index]:
            self.give(number, index)

    @rule(index=member, limit=st.integers(1, 5))
    def recover(self, index, limit):
        """A crash, and another one in the middle of rebuilding."""
        self.read(index, limit)
        self.commit(index)
        self.crash(index)
        self.read(index, limit)
        self.commit(index)
        self.crash(index)

    @rule(index=member)
    def fail_transaction(self, index):
        member = self.members[index]
        member.host.transaction()
        self.act(member, member.host.failed())

    @rule(partition=partition)
    def rebalance(self, partition):
        old = self.owner[partition]
        self.members[old].host.revoke([partition])
        self.give(partition, 1 - old)

    @precondition(lambda self: any(len(log) > 8 for log in self.logs.values()))
    @rule(index=member)
    def read_twice(self, index):
        """A stale fetch after a seek: the same records come again."""
        member = self.members[index]
        for number in member.host.emitted_up_to:
            member.fetch_from[number] = max(0, member.fetch_from[number] - 2)
        self.poll(member, 3)

    @precondition(lambda self: any(len(log) > 8 for log in self.logs.values()))
    @rule(index=member, skip=st.integers(1, 4))
    def client_jumps(self, index, skip):
        """A client that passes records over, as a seek that is undone has been seen to do."""
        member = self.members[index]
        for number in member.host.emitted_up_to:
            here = number, member.host._active[number].position
            there = member.fetch_from[number] + skip
            # What is passed over twice is taken for a hole in the log; a jump shows at the next record.
            if here not in member.jumped and there < len(self.logs[number]):
                member.jumped.add(here)
                member.fetch_from[number] = there
        self.poll(member, 3)

    # --- what must hold

    @invariant()
    def nothing_is_written_twice(self):
        for number in PARTITIONS:
            signals, results, _ = read_outputs(item for item in self.verdicts if item.source_partition == number)
            assert all(count == 1 for count in (signals + results).values())
        assert all(count == 1 for letters in self.dead.values() for count in letters.values())

    @invariant()
    def an_abort_is_sent_before_the_verdict_that_names_it(self):
        assert self.covered <= set(self.aborts)

    def teardown(self):
        if not hasattr(self, "members"):
            return
        for member in self.members:
            # Once more where the client had passed records over.
            self.poll(member, 10**6)
            self.poll(member, 10**6)
            self.write(member)
        for number, log in self.logs.items():
            mine = [item for item in self.verdicts if item.source_partition == number]
            plain = PlainReader(log)
            assert read_outputs(mine) == (plain.signals, plain.results, plain.scores)
            assert self.dead[number] == plain.dead


HostsUnderFire.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestHostsUnderFire = pytest.mark.timeout(300)(HostsUnderFire.TestCase)
