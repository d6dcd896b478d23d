"""A state machine that crashes probe hosts after any action and compares what they wrote with a plain oracle."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.undercurrent.protocol.host_oracle import PlainReader, read_outputs
from tests.unit.undercurrent.protocol.host_world import (
    FINGERPRINT,
    KILLER,
    PARTITIONS,
    POINT,
    CountingRunner,
    DeathError,
    Member,
    block,
    ended,
    invalidated,
    started,
)
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Commit, Fetch, Incoming, Read, SendAbort
from undercurrent.protocol.host_position import Committed, resume_from
from undercurrent.protocol.host_states import Keeping
from undercurrent.protocol.messages import (
    EndReason,
    PublisherStarted,
)


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
        self.places = {}
        self.revisions = {}
        self.incarnation = 1
        self.states = {number: {} for number in PARTITIONS}
        self.killers = 0

    @initialize(after=st.sampled_from([None, 1, 2, 4]))
    def start(self, after):
        self.keeping = None if after is None else Keeping(checkpoint_after_bytes=after)
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
        key = partition, request, attempt, shard
        self.seqs[key], self.places[key], self.revisions[key] = 1, 0, 0
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
        key = partition, request, attempt, shard
        for _ in range(count):
            seq = self.next_seq(partition, request, attempt, shard, skip)
            place = max(0, self.places.get(key, 0) + skip)
            self.places[key] = place + 1
            incarnation, revision = max(1, self.incarnation - late), self.revisions.get(key, 0)
            message = block(
                request, attempt, place, seq, shard=shard, incarnation=incarnation, revision=max(0, revision)
            )
            self.logs[partition].append(message)

    @rule(partition=partition, request=request, attempt=attempt, count=st.integers(1, 4), ends=st.booleans())
    def append_both_shards(self, partition, request, attempt, count, ends):
        """A stream whose two shards send the same positions, one after the other."""
        for shard in (0, 1):
            self.append_start(partition, request, attempt, shards=2, shard=shard)
        for shard in (1, 0):
            self.append_blocks(partition, request, attempt, shard, skip=0, late=0, count=count)
            if ends:
                self.append_end(partition, request, attempt, shard, EndReason.FINISHED)

    @rule(
        partition=partition,
        request=request,
        attempt=attempt,
        shards=st.sampled_from([(0,), (0, 1), (1, 0)]),
        back=st.integers(0, 3),
        lost=st.sampled_from([False, False, False, True]),
        late=st.sampled_from([0, 0, 1]),
    )
    def append_rewind(self, partition, request, attempt, shards, back, lost, late):
        """Rows are void from some position on; the word of it may be lost, and a block of the old one may follow."""
        for shard in shards:
            key = partition, request, attempt, shard
            self.places[key] = max(0, self.places.get(key, 0) - back)
            self.revisions[key] = self.revisions.get(key, 0) + 1
            seq = self.next_seq(partition, request, attempt, shard, 0)
            message = invalidated(
                request, attempt, self.places[key], self.revisions[key], seq, self.incarnation, shard=shard
            )
            if not lost:
                self.logs[partition].append(message)
            self.revisions[key] -= late
            self.append_blocks(partition, request, attempt, shard, skip=0, late=0, count=1)
            self.revisions[key] += late

    @rule(
        partition=partition,
        request=request,
        attempt=attempt,
        shard=shard,
        kind=st.sampled_from(["start", "block", "end"]),
    )
    def append_of_another_engine(self, partition, request, attempt, shard, kind):
        """Another live engine writes the same stream."""
        place = self.places.get((partition, request, attempt, shard), 0)
        seq = self.seqs.get((partition, request, attempt, shard), 0)
        message = {
            "start": started(request, attempt, engine="z", shards=shard + 1, shard=shard),
            "block": block(request, attempt, place, seq, engine="z", shard=shard),
            "end": ended(request, attempt, seq, engine="z", shard=shard),
        }[kind]
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

    @rule(partition=partition, before=st.integers(0, 4), after=st.integers(0, 3), ends=st.booleans())
    def append_killer(self, partition, before, after, ends):
        """A stream of its own with a record that no host survives."""
        self.killers += 1
        self.append_start(partition, "k", self.killers, shards=1, shard=0)
        self.append_blocks(partition, "k", self.killers, shard=0, skip=0, late=0, count=before)
        seq = self.next_seq(partition, "k", self.killers, 0, 0)
        self.logs[partition].append(block("k", self.killers, before, seq, incarnation=self.incarnation, step=KILLER))
        self.append_blocks(partition, "k", self.killers, shard=0, skip=0, late=0, count=after)
        if ends:
            self.append_end(partition, "k", self.killers, 0, EndReason.FINISHED)

    # --- the hosts

    def new_member(self):
        runner = CountingRunner()
        return Member(ProbeHost(POINT, FINGERPRINT, runner, abort_max_age_us=10**12, keeping=self.keeping))

    def give(self, partition, index):
        self.owner[partition] = index
        self.act(self.members[index], self.members[index].host.assign([partition]))

    def act(self, member, actions):
        for action in actions:
            match action:
                case Fetch(partition=number):
                    resume = resume_from(self.committed.get(number), 0, len(self.logs[number]), FINGERPRINT, "earliest")
                    states = list(self.states[number].values()) if resume.states else []
                    self.act(member, member.host.begin(number, resume, states))
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
        for key, state in transaction.states.items():
            self.states[key.partition][key.stream] = state
            if state is None:
                del self.states[key.partition][key.stream]
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
                batch.append(Incoming(number, offset, 0, message, "bad", size=1))
            member.fetch_from[number] = max(start, min(start + limit, len(self.logs[number])))
        try:
            self.feed(member, batch)
        except DeathError:
            self.crash(self.members.index(member))

    def feed(self, member, batch):
        plain = []
        for record in batch:
            if member.fetch_from[record.partition] <= record.offset:
                continue  # read again from further back
            if record.partition not in member.host.careful:
                plain.append(record)
                continue
            self.act(member, member.host.records(plain, now_us=0))
            plain = []
            member.host.take_in_hand(record.partition, record.offset)
            self.write(member)
            self.act(member, member.host.records([record], now_us=0))
            self.write(member)
        self.act(member, member.host.records(plain, now_us=0))

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

    def low(self, number):
        return self.committed[number].offset

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
        for _ in range(3 + 12 * self.killers):
            # Once more where the client had passed records over, and where a host died.
            for index in (0, 1):
                self.poll(self.members[index], 10**6)
                self.write(self.members[index])
        for number, log in self.logs.items():
            mine = [item for item in self.verdicts if item.source_partition == number]
            plain = PlainReader(log)
            assert read_outputs(mine) == (plain.signals, plain.results, plain.scores)
            assert self.dead[number] == +plain.dead
            open_still = {stream.id for stream in self.members[self.owner[number]].host.open_streams(number)}
            needed = {name for name, state in self.states[number].items() if state.position >= self.low(number)}
            assert self.states[number].keys() <= open_still | needed, "nobody goes on from the others any more"


HostsUnderFire.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestHostsUnderFire = pytest.mark.timeout(300)(HostsUnderFire.TestCase)
