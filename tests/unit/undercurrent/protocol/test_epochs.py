"""What a commit's metadata says, and how a new owner begins from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit import messages
from undercurrent.errors import ProtocolError
from undercurrent.protocol.commits import Progress
from undercurrent.protocol.epochs import (
    MAX_METADATA_BYTES,
    LogRange,
    Position,
    begin,
    decode_metadata,
    encode_metadata,
    taken_by_retention,
)
from undercurrent.protocol.generations import GenerationsReader

PROMPTS = LogRange(10, 100)
GENERATIONS = LogRange(5, 500)
UNIX_S = 1_800_000_000


def start(committed, *, prompts=PROMPTS, generations=GENERATIONS, at_least=1):
    return begin(committed, prompts=prompts, generations=generations, unix_s=UNIX_S, at_least=at_least)


@given(
    offset=st.integers(0, 1 << 40),
    epoch=st.integers(1, 1 << 40),
    read_from=st.integers(0, 1 << 40),
    finished=st.sets(st.integers(1, 300)),
    unexplained=st.dictionaries(st.integers(0, 300), st.integers(1, 9), max_size=20),
)
def test_metadata_says_what_was_put_in(offset, epoch, read_from, finished, unexplained):
    position = Position(
        offset=offset,
        epoch=epoch,
        read_from=read_from,
        finished=frozenset(offset + at for at in finished),
        unexplained={offset + at: count for at, count in unexplained.items()},
    )
    assert decode_metadata(offset, encode_metadata(position)) == position


@pytest.mark.parametrize(
    "text", ["", "{}", "null", "7", '{"v":1}', '{"v":1,"e":1,"G":0,"d":"x"}', '{"v":2,"e":1,"G":0}']
)
def test_metadata_of_another_kind_is_refused(text):
    with pytest.raises(ProtocolError):
        decode_metadata(3, text)


def test_an_owner_takes_an_epoch_above_the_last_ones():
    known = Position(offset=20, epoch=4, read_from=40, finished=frozenset({22}))
    beginning = start((20, encode_metadata(known)))
    assert beginning.position == Position(offset=20, epoch=5, read_from=40, finished=frozenset({22}))
    assert not beginning.reset


def test_an_owner_takes_an_epoch_above_one_that_it_has_met():
    known = encode_metadata(Position(offset=20, epoch=4, read_from=40))
    assert start((20, known), at_least=9).position.epoch == 9


def test_a_new_group_on_a_new_log_begins_with_epoch_1_at_the_logs_start():
    beginning = start(None, generations=LogRange(0, 0))
    assert beginning.position == Position(offset=10, epoch=1, read_from=0)


def test_an_expired_offset_gives_an_epoch_above_all_that_were_counted():
    assert start(None).position == Position(offset=10, epoch=UNIX_S, read_from=5)


def test_an_operators_reset_gives_an_epoch_above_all_that_were_counted():
    beginning = start((30, ""))
    assert beginning.position == Position(offset=30, epoch=UNIX_S, read_from=5)
    assert beginning.reset


@pytest.mark.parametrize(("offset", "taken"), [(3, 10), (170, 100)])
def test_an_offset_outside_the_log_is_taken_into_it_and_its_metadata_is_not_believed(offset, taken):
    metadata = encode_metadata(Position(offset=offset, epoch=4, read_from=40, finished=frozenset({offset + 1})))
    position = start((offset, metadata)).position
    assert (position.offset, position.epoch, position.finished) == (taken, UNIX_S, frozenset())


@pytest.mark.parametrize("read_from", [2, 900])
def test_generations_that_are_gone_are_read_from_what_is_left(read_from):
    metadata = encode_metadata(Position(offset=20, epoch=4, read_from=read_from))
    assert start((20, metadata)).position.read_from == 5


def accepted(offset, request_id=None):
    return messages.accepted(request_id or f"r{offset}", prompt_offset=offset, points=())


def test_the_low_watermark_is_the_lowest_unfinished_prompt():
    progress = Progress(Position(offset=5, epoch=1, read_from=0))
    for offset in (5, 6, 9):
        assert progress.fetched(offset)
    progress.finish(6)
    assert (progress.low, progress.finished) == (5, {6})
    progress.finish(5)
    assert (progress.low, progress.finished) == (9, frozenset())
    progress.finish(9)
    assert progress.low == 10
    assert not progress.fetched(9)


def test_what_an_owner_before_has_finished_is_not_done_again():
    progress = Progress(Position(offset=5, epoch=1, read_from=0, finished=frozenset({7})))
    assert [progress.fetched(offset) for offset in (5, 6, 7, 8)] == [True, True, False, True]
    progress.finish(5)
    progress.finish(6)
    assert progress.low == 8


def test_a_new_owner_reads_back_to_the_first_claim_of_what_is_unfinished():
    reader = GenerationsReader()
    progress = Progress(Position(offset=0, epoch=1, read_from=0))
    for offset in range(3):
        progress.fetched(offset)
        reader.apply(accepted(offset), offset=100 + offset)
    progress.finish(0)
    progress.finish(2)
    position, _ = progress.position(reader, 200)
    assert (position.offset, position.read_from, position.finished) == (1, 101, {2})
    assert position.unexplained == {1: 1}


def test_metadata_that_grows_too_large_leaves_the_finished_to_the_log():
    reader = GenerationsReader()
    progress = Progress(Position(offset=0, epoch=1, read_from=0))
    for offset in range(4000):
        progress.fetched(offset)
        reader.apply(accepted(offset), offset=100 + offset)
    for offset in range(2, 4000, 2):
        progress.finish(offset)
    position, metadata = progress.position(reader, 9000)
    assert len(metadata) <= MAX_METADATA_BYTES
    read = decode_metadata(0, metadata)
    assert (read.finished, read.unexplained) == (frozenset(), {})
    assert position.read_from == 100


def test_metadata_keeps_the_counts_of_unfinished_claims_while_they_fit():
    reader = GenerationsReader()
    progress = Progress(Position(offset=0, epoch=1, read_from=0))
    for offset in range(0, 2000):
        progress.fetched(offset)
        if offset % 20 == 0:
            reader.apply(accepted(offset), offset=100 + offset)
        elif offset % 2 == 0:
            progress.finish(offset)
    _, metadata = progress.position(reader, 9000)
    assert len(metadata) <= MAX_METADATA_BYTES
    assert decode_metadata(0, metadata).finished == frozenset()
    assert len(decode_metadata(0, metadata).unexplained) == 100


@pytest.mark.parametrize(
    ("finished", "start", "expected"),
    [
        (None, 9, [(4, 9)]),
        (set(), 4, []),
        ({5, 6, 8, 12}, 9, [(4, 5), (7, 8)]),
        ({4, 5}, 6, []),
    ],
)
def test_what_retention_took_is_what_nobody_had_finished(finished, start, expected):
    metadata = "somebody else's"
    if finished is not None:
        metadata = encode_metadata(Position(offset=4, epoch=1, read_from=0, finished=frozenset(finished)))
    assert list(taken_by_retention((4, metadata), LogRange(start, 20))) == expected


def test_a_group_that_never_committed_knows_of_nothing_that_is_gone():
    assert taken_by_retention(None, LogRange(9, 20)) == ()


def test_a_group_that_comes_back_after_any_time_is_told_at_once_what_is_gone() -> None:
    metadata = encode_metadata(Position(offset=4, epoch=1, read_from=0, finished=frozenset({6})))
    assert taken_by_retention((4, metadata), LogRange(10**15, 10**15)) == ((4, 6), (7, 10**15))
