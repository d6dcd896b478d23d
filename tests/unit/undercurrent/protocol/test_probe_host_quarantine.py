"""Which record is quarantined, and which are not: whoever counts wrongly loses an innocent one."""

from __future__ import annotations

import pytest

from tests.unit.undercurrent.protocol.host_oracle import read_outputs
from tests.unit.undercurrent.protocol.host_world import (
    FINGERPRINT,
    KILLER,
    POINT,
    CountingRunner,
    DeathError,
    block,
    ended,
    started,
)
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Commit, Incoming
from undercurrent.protocol.host_position import Committed, HostMetadata, resume_from

BEFORE = 12


class World:
    """One partition, one group, one member at a time."""

    def __init__(self, log):
        self.log = log
        self.committed = None
        self.verdicts, self.letters = [], []
        self.killers = {at for at, message in enumerate(log) if getattr(message, "step", 0) == KILLER}

    def metadata(self):
        return HostMetadata.from_text(self.committed.metadata)

    def write(self, host):
        transaction = host.transaction()
        self.verdicts += transaction.verdicts
        self.letters += transaction.dead_letters
        for offset, metadata in transaction.offsets.values():
            self.committed = Committed(offset=offset, metadata=metadata)

    def take_up(self, host=None):
        host = host or ProbeHost(POINT, FINGERPRINT, CountingRunner(), abort_max_age_us=10**12)
        host.assign([0])
        resume = resume_from(self.committed, 0, len(self.log), FINGERPRINT, "earliest")
        if any(isinstance(action, Commit) for action in host.begin(0, resume)):
            self.write(host)
        return host, resume.offset

    def live(self, batch=5, most=10**6):
        """Run a member to the log's end, or to its death, which is returned."""
        host, offset = self.take_up()
        try:
            while offset < min(len(self.log), most):
                careful = 0 in host.careful
                records = [
                    Incoming(0, at, 0, self.log[at], raw=at, size=1)
                    for at in range(offset, min(len(self.log), offset + (1 if careful else batch)))
                ]
                if careful:
                    host.take_in_hand(0, offset)
                    self.write(host)
                host.records(records, 0)
                offset += len(records)
                self.write(host)
        except DeathError:
            return True
        return False


def log_with_killer():
    return [
        started("good", 1),
        started("bad", 1),
        *(block("good", 1, at, at + 1) for at in range(BEFORE - 3)),
        block("bad", 1, 0, 1),
        block("bad", 1, 1, 2, step=KILLER),
        block("bad", 1, 2, 3),
        ended("bad", 1, 4),
        *(block("good", 1, at, at + 1) for at in range(BEFORE - 3, BEFORE)),
        ended("good", 1, BEFORE + 1),
    ]


def test_the_third_assignment_without_progress_finds_the_record_and_its_second_death_quarantines_it():
    world = World(log_with_killer())
    [killer] = world.killers
    deaths = 0
    while world.live():
        deaths += 1
        assert deaths < 10
    assert deaths == 5, "progress up to its batch, two that make none, and two with the record in hand"
    assert [(letter.offset, letter.cause, letter.raw) for letter in world.letters] == [(killer, "quarantined", killer)]
    _, results, scores = read_outputs(world.verdicts)
    said = {(name[0], name[-1]) for name in results}
    assert said == {("bad", "quarantined"), ("good", "finished")}
    assert scores["good", 1, 0] == list(range(BEFORE))
    assert world.metadata().emitted_up_to == len(world.log)


def test_a_record_stays_quarantined_for_as_long_as_it_is_read_again():
    world = World(log_with_killer()[:-4])
    while world.live():
        pass
    assert world.committed.offset == 0, "a stream from before is still open"
    assert [item.offset for item in world.metadata().quarantined] == list(world.killers)
    said, letters = len(world.verdicts), len(world.letters)
    assert not world.live()
    assert (len(world.verdicts), len(world.letters)) == (said, letters)
    world.log += log_with_killer()[-4:]
    assert not world.live()
    assert world.metadata().quarantined == ()


def test_several_killers_in_a_row_are_found_one_by_one():
    log = log_with_killer()
    at = next(at for at, message in enumerate(log) if getattr(message, "step", 0) == KILLER)
    more = [message for name in "xyz" for message in (started(name, 1), block(name, 1, 0, 1, step=KILLER))]
    world = World([*log[: at + 1], *more, *log[at + 1 :]])
    deaths = 0
    while world.live():
        deaths += 1
        assert deaths < 20
    assert {letter.offset for letter in world.letters} == world.killers
    assert len(world.letters) == 4
    assert deaths == 11, "the careful member goes on carefully: each further one costs two deaths"


def test_a_partition_with_nothing_to_read_counts_nothing():
    world = World(log_with_killer()[:1])
    for _ in range(6):
        world.live()
        world.committed = Committed(offset=1, metadata=HostMetadata(emitted_up_to=1, fingerprint=FINGERPRINT).to_text())
    host, _ = world.take_up()
    assert 0 not in host.careful


def test_members_that_leave_in_good_order_do_not_count():
    world = World(log_with_killer())
    for _ in range(6):
        host, _ = world.take_up()
        assert 0 not in host.careful
        host.leave([0])
        world.write(host)
    assert world.metadata().stalled == 0


def test_a_member_that_leaves_while_it_is_careful_leaves_care_behind_and_no_record_in_hand():
    world = World(log_with_killer())
    for _ in range(3):
        host, offset = world.take_up()
    assert 0 in host.careful
    host.take_in_hand(0, offset)
    world.write(host)
    assert world.metadata().in_hand == offset
    host.records([Incoming(0, offset, 0, world.log[offset])], 0)
    host.leave([0])
    world.write(host)
    assert world.metadata().in_hand is None
    host, _ = world.take_up()
    assert 0 in host.careful


def test_transactions_that_fail_are_no_deaths():
    world = World(log_with_killer())
    host, _ = world.take_up()
    for _ in range(6):
        host.transaction()
        host.failed()
        host, _ = world.take_up(host)
        assert 0 not in host.careful


def test_a_failed_transaction_does_not_quarantine_the_members_own_record_in_hand():
    world = World(log_with_killer())
    for _ in range(3):
        host, _ = world.take_up()
    host.take_in_hand(0, 0)
    world.write(host)
    host.failed()
    host, _ = world.take_up(host)
    host.records([Incoming(0, 0, 0, world.log[0])], 0)
    world.write(host)
    assert world.letters == []


def test_one_death_with_a_record_in_hand_may_have_come_from_elsewhere():
    world = World(log_with_killer())
    for _ in range(3):
        host, _ = world.take_up()
    host.take_in_hand(0, 0)
    world.write(host)
    host, _ = world.take_up()  # the last one died
    assert 0 in host.careful
    host.take_in_hand(0, 0)
    world.write(host)
    assert (world.metadata().in_hand, world.metadata().strikes) == (0, 2)
    host.records([Incoming(0, 0, 0, world.log[0])], 0)
    world.write(host)
    assert (world.metadata().in_hand, world.metadata().emitted_up_to) == (None, 1)
    assert world.letters == []


def test_a_record_that_is_passed_over_is_not_in_hand():
    world = World(log_with_killer())
    for _ in range(3):
        host, _ = world.take_up()
    host.take_in_hand(0, 3)
    world.write(host)
    assert world.metadata().in_hand is None


def test_care_ends_after_a_while():
    world = World([started("good", 1), *(block("good", 1, at, at + 1) for at in range(1100))])
    for _ in range(3):
        host, _ = world.take_up()
    assert 0 in host.careful
    for at, message in enumerate(world.log):
        host.records([Incoming(0, at, 0, message)], 0)
    assert 0 not in host.careful
    world.write(host)
    assert world.metadata().stalled == 0


@pytest.mark.parametrize("count", [1, 3])
def test_a_record_that_begins_to_kill_while_it_is_only_rebuilt_is_told_and_quarantined_once(count):
    """Its outputs were written long ago: its letter and its stream's failure come all the same, and once."""
    world = World([started("late", 1), *(block("late", 1, at, at + 1) for at in range(6))])
    assert not world.live()
    world.log += [block("late", 1, 6, 7), ended("late", 1, 8)]
    world.log[3] = block("late", 1, 2, 3, step=KILLER)
    deaths = 0
    while world.live(batch=count):
        deaths += 1
        assert deaths < 10
    assert [(letter.offset, letter.cause) for letter in world.letters] == [(3, "quarantined")]
    assert not world.live()
    assert len(world.letters) == 1


def test_the_metadata_of_many_quarantined_records_fits_a_commit():
    world = World([started("s", 1)])
    for at in range(80):
        name = f"k{at}"
        world.log += [started(name, 1), block(name, 1, 0, 1, step=KILLER)]
    world.killers = {at for at, message in enumerate(world.log) if getattr(message, "step", 0) == KILLER}
    for _ in range(400):
        if not world.live():
            break
        assert len(world.committed.metadata) < 4000
    assert {letter.offset for letter in world.letters} == world.killers


def test_who_leaves_before_it_has_begun_with_a_record_lays_no_death_to_it():
    log = [started("r", 1), block("r", 1, 0, 1), ended("r", 1, 2)]
    world = World(log)
    world.committed = Committed(
        offset=0, metadata=HostMetadata(emitted_up_to=0, fingerprint=FINGERPRINT, stalled=BEFORE).to_text()
    )
    host, _ = world.take_up()
    host.take_in_hand(0, 0)
    world.write(host)
    assert world.metadata().in_hand == 0
    host.leave([0])
    world.write(host)
    assert world.metadata().in_hand is None
