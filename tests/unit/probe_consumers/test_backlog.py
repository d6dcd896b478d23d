"""How much is worked on at once, and what is left when partitions go."""

from __future__ import annotations

from probe_consumers.backlog import Backlog
from undercurrent.kafka.records import Record

KB = b"x" * 1024
NOBODY = frozenset()


def records(partition, *offsets, value=KB):
    return [Record("t", partition, offset, b"", value, 0, ()) for offset in offsets]


def offsets(part):
    return [(record.partition, record.offset) for record in part]


def test_parts_grow_while_they_are_quick_and_shrink_once_they_are_slow():
    backlog = Backlog(500)
    backlog.add(records(0, *range(1000)))
    sizes = []
    for seconds in (0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.3, 2.0, 20.0, 20.0):
        sizes.append(len(backlog.part(NOBODY)))
        backlog.took(seconds)
    sizes.append(len(backlog.part(NOBODY)))
    assert sizes == [8, 16, 32, 64, 128, 256, 500, 500, 500, 25, 1, 1]


def test_a_part_of_long_prompts_has_fewer_records_than_one_of_single_tokens():
    backlog = Backlog(500)
    backlog.add([*records(0, 1, 2, value=20 * KB), *records(0, *range(3, 50))])
    seen = []
    while backlog:
        part = backlog.part(NOBODY)
        backlog.take(len(part))
        seen.append(len(part))
    assert seen == [1, 1, 8, 8, 8, 8, 8, 7]


def test_a_partition_that_is_read_carefully_gives_one_record_at_a_time():
    backlog = Backlog(500)
    backlog.add([*records(0, 1, 2), *records(1, 7, 8), *records(0, 3)])
    seen = []
    while backlog:
        part = backlog.part({1})
        backlog.take(len(part))
        seen.append(offsets(part))
    assert seen == [[(0, 1), (0, 2)], [(1, 7)], [(1, 8)], [(0, 3)]]


def test_what_a_partition_leaves_is_taken_away_in_order_and_the_rest_stays():
    backlog = Backlog(500)
    backlog.add([*records(0, 1, 2), *records(1, *range(70)), *records(0, 3)])
    parts = [offsets(part) for part in backlog.parts_of([1])]
    assert [item for part in parts for item in part] == [(1, at) for at in range(70)]
    assert max(map(len, parts)) < 70
    assert offsets(backlog.part(NOBODY)) == [(0, 1), (0, 2), (0, 3)]
