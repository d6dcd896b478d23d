"""Slots of running requests: taken side by side, never mistaken for one another's."""

import random

import numpy as np
import pytest

from undercurrent.capture.lengths import FINAL, NO_LIMIT, LengthTable, Limits, length_in, share_of
from undercurrent.capture.ring import Ring
from undercurrent.errors import CaptureError, RingError


def words(entries):
    return memoryview(bytearray(8 * entries)).cast("q")


def test_children_stand_side_by_side_and_are_read_apart():
    memory = words(8)
    table, known = LengthTable(memory), Limits(memory)
    first, second = table.take(2), table.take(3)
    places = [known.add(slot, 4) for slot in (first, first + 1, second, second + 1, second + 2)]
    table.tell(first, 1, 9)
    table.tell(second, 0, 7, final=True)
    table.tell(second, 2, 2)
    known.look()
    # Below the length of the prompt everything is real.
    assert known.limits[places].tolist() == [4, 9, 7, 4, 4]
    assert known.final[places].tolist() == [False, False, True, False, False]
    assert not known.gone[places].any()


def test_a_stream_without_a_slot_has_no_limit_and_costs_no_look():
    memory = words(2)
    known = Limits(memory)
    at = known.add(-1, 4)
    assert (known.limits[at], known.slots) == (NO_LIMIT, 0)
    assert known.look().size == 0
    other = known.add(LengthTable(memory).take(1), 1)
    known.look()
    assert (known.limits[at], known.limits[other], known.slots) == (NO_LIMIT, 1, 1)


def test_a_slot_that_another_request_has_by_now_says_nothing_of_this_one():
    memory = words(1)
    table, known = LengthTable(memory), Limits(memory)
    old = table.take(1)
    table.tell(old, 0, 5)
    at = known.add(old, 2)
    table.free(old, 1)
    new = table.take(1)
    table.tell(new, 0, 100)
    assert known.look().tolist() == [True]
    assert (known.limits[at], known.gone[at], known.final[at]) == (5, True, False)
    other = known.add(new, 2)
    assert (known.limits[other], known.gone[other]) == (100, False)
    # Whose last length was read before keeps it.
    table.tell(new, 0, 120, final=True)
    known.look()
    table.free(new, 1)
    table.tell(table.take(1), 0, 900)
    known.look()
    assert (known.limits[other], known.final[other], known.gone[other]) == (120, True, False)


def test_a_slot_that_nobody_ever_took_confirms_nothing():
    known = Limits(words(4))
    at = known.add(3, 2)
    assert (known.limits[at], known.gone[at]) == (2, True)


def test_a_look_tells_what_is_new():
    memory = words(4)
    table, known = LengthTable(memory), Limits(memory)
    slot = table.take(2)
    for index in range(2):
        known.add(slot + index, 1)
    table.tell(slot, 1, 3)
    assert known.look().tolist() == [False, True]
    assert known.look().tolist() == [False, False]
    table.tell(slot, 1, 3, final=True)
    assert known.look().tolist() == [False, True]


def test_places_are_used_again_and_grow():
    memory = words(64)
    table, known = LengthTable(memory), Limits(memory)
    slots = [table.take(1) for _ in range(40)]
    places = [known.add(slot, 1) for slot in slots]
    for number, slot in enumerate(slots):
        table.tell(slot, 0, 10 + number)
    known.look()
    assert known.limits[places].tolist() == [10 + number for number in range(40)]
    known.remove(places[7])
    assert known.add(-1, 1) == places[7]
    assert known.slots == 39


def test_slots_of_running_requests_never_overlap_and_a_full_table_says_so():
    rng, size = random.Random(5), 32
    memory = words(size)
    table = LengthTable(memory)
    live, seen = {}, set()
    for _ in range(4000):
        children = rng.randint(1, 5)
        try:
            slot = table.take(children)
        except CaptureError:
            occupied = {(slot + i) % size for slot, n in live.items() for i in range(n)}
            windows = (set(range(first, first + children)) for first in range(size - children + 1))
            assert all(window & occupied for window in windows)
        else:
            assert slot not in seen
            assert slot // size == (slot + children - 1) // size
            seen.add(slot)
            live[slot] = children
        entries = [(slot + i) % size for slot, n in live.items() for i in range(n)]
        assert len(entries) == len(set(entries)) == table.used
        while live and (rng.random() < 0.5 or table.used > size - 4):
            slot = rng.choice(list(live))
            table.free(slot, live.pop(slot))
    with pytest.raises(CaptureError, match="no 33 of 32"):
        table.take(33)


def test_nothing_is_told_or_freed_without_a_slot():
    memory = words(2)
    table = LengthTable(memory)
    table.tell(-1, 0, 9, final=True)
    table.free(-1, 1)
    assert np.frombuffer(memory, np.int64).tolist() == [0, 0]


def test_the_table_is_shared_by_who_opens_the_ring():
    ring = Ring.create(8192, slots=7)
    other = Ring.open(ring.path)
    assert (len(ring.lengths), len(other.lengths), other.capacity) == (7, 7, 8192)
    slot = LengthTable(ring.lengths).take(1)
    LengthTable(ring.lengths).tell(slot, 0, 11, final=True)
    assert other.lengths[slot % 7] == FINAL | 1 << 32 | 11
    # The last frame byte and the first word do not touch.
    assert len(other.data) == 8192
    for opened in (ring, other):
        opened.close()
    with pytest.raises(RingError, match="slots"):
        Ring.create(8192, slots=0)


@pytest.mark.parametrize(("count", "size"), [(1, 8), (2, 9), (3, 64), (64, 65_536)])
def test_shares_of_a_table_are_apart_and_leave_nothing_out(count, size):
    entries = [entry for index in range(count) for entry in share_of(index, count, size)]
    assert entries == list(range(size))


def test_writers_of_one_table_stay_in_their_shares_and_write_every_copy_alike():
    memory, copy = words(8), words(8)
    tables = [LengthTable(memory, [copy], share_of(index, 2, 8)) for index in (0, 1)]
    told = {}
    for number in range(40):
        table = tables[number % 2]
        slot = table.take(1 + number // 20)
        assert {(slot + child) % 8 // 4 for child in range(1 + number // 20)} == {number % 2}
        table.tell(slot, 0, number + 1, final=True)
        told[slot] = number + 1
        for slots in (memory, copy):
            assert length_in(slots, slot) == (number + 1, True)
        table.free(slot, 1 + number // 20)
    assert len(told) == 40, "no slot comes twice"


def test_a_share_that_is_full_takes_nothing_of_the_others():
    table = LengthTable(words(8), share=share_of(1, 2, 8))
    taken = [table.take(1) for _ in range(4)]
    with pytest.raises(CaptureError, match="no 1 of 4"):
        table.take(1)
    table.free(taken[2], 1)
    assert table.take(1) % 8 == taken[2] % 8
    with pytest.raises(CaptureError, match="no 5 of 4"):
        LengthTable(words(8), share=share_of(0, 2, 8)).take(5)
