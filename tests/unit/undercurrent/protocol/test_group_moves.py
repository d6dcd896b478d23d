"""A group that is moved by hand keeps what its commits knew, and says what it leaves behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.errors import ProtocolError
from undercurrent.protocol.epochs import (
    MAX_METADATA_BYTES,
    LogRange,
    Position,
    begin,
    decode_metadata,
    encode_metadata,
)
from undercurrent.protocol.group_moves import move_host, move_worker
from undercurrent.protocol.host_position import Committed, HostMetadata, resume_from

LOG = LogRange(10, 100)
ANSWERS = LogRange(5, 900)


def of_host(offset: int, e: int, **fields: int) -> Committed:
    return Committed(offset=offset, metadata=HostMetadata(emitted_up_to=e, fingerprint="abc", **fields).to_text())


def resumed(offset: int, metadata: str):
    return resume_from(Committed(offset=offset, metadata=metadata), LOG.start, LOG.end, "abc", "earliest")


def test_a_host_that_is_moved_back_reads_again_and_says_nothing_twice():
    move = move_host(of_host(40, 60, stalled=2, in_hand=41, strikes=1, states=3, states_from=9), 20, LOG)
    assert (move.offset, move.skipped, move.said_again) == (20, 0, 0)
    found = resumed(move.offset, move.metadata)
    assert (found.offset, found.emitted_up_to, found.declarations) == (20, 60, ())
    metadata = HostMetadata.from_text(move.metadata)
    assert metadata is not None
    assert (metadata.stalled, metadata.in_hand, metadata.strikes) == (0, None, 0)
    assert (metadata.states, metadata.states_from, metadata.fingerprint) == (3, 9, "abc")


def test_a_host_says_again_what_it_is_told_to():
    move = move_host(of_host(40, 60), 20, LOG, say_again=True)
    assert (move.said_again, resumed(move.offset, move.metadata).emitted_up_to) == (40, 20)


def test_a_host_that_is_moved_forward_leaves_behind_what_nobody_judged():
    move = move_host(of_host(40, 60), 75, LOG)
    assert (move.skipped, move.said_again) == (15, 0)
    found = resumed(move.offset, move.metadata)
    assert (found.offset, found.emitted_up_to) == (75, 75)
    assert move_host(of_host(40, 60), 50, LOG).skipped == 0, "up to e everything was said"


def test_a_host_s_commit_without_metadata_of_ours_has_nothing_to_keep():
    for text in (None, "", "{}", '{"v": 9}'):
        move = move_host(Committed(offset=40, metadata=text), 20, LOG)
        assert (move.metadata, move.said_again, move.skipped) == ("", 20, 0)
        assert move_host(Committed(offset=40, metadata=text), 50, LOG).skipped == 10
    assert move_host(None, 20, LOG).metadata == ""


def of_worker(offset: int, finished=(), **fields) -> Committed:
    position = Position(offset=offset, epoch=7, read_from=300, finished=frozenset(finished), **fields)
    return Committed(offset=offset, metadata=encode_metadata(position))


def begun(offset: int, metadata: str):
    return begin((offset, metadata), prompts=LOG, generations=ANSWERS, unix_s=1_000_000)


def test_workers_that_are_moved_back_keep_their_epoch_and_read_every_answer_first():
    move = move_worker(of_worker(40, finished=(42, 50)), 20, LOG, ANSWERS)
    assert move.skipped == 0
    found = begun(move.offset, move.metadata)
    assert not found.reset
    assert (found.position.offset, found.position.epoch, found.position.read_from) == (20, 8, ANSWERS.start)
    assert found.position.finished == {42, 50}


def test_workers_that_are_moved_forward_leave_unfinished_prompts_behind():
    move = move_worker(of_worker(40, finished=(42, 50), unexplained={41: 1, 60: 2}), 45, LOG, ANSWERS)
    assert move.skipped == 4, "of 40 to 44 only 42 is finished"
    known = decode_metadata(move.offset, move.metadata)
    assert (known.epoch, known.read_from, known.finished, known.unexplained) == (7, 300, {50}, {60: 2})


def test_workers_without_metadata_of_ours_begin_with_the_clock():
    move = move_worker(Committed(offset=40, metadata="?"), 20, LOG, ANSWERS)
    assert (move.metadata, move.skipped) == ("", 0)
    assert begun(20, "").position.epoch == 1_000_000
    assert move_worker(Committed(offset=40, metadata=None), 44, LOG, ANSWERS).skipped == 4


@pytest.mark.parametrize("target", [9, 101, -1])
def test_an_offset_that_the_log_has_not_is_refused(target):
    for move in (lambda: move_host(of_host(40, 60), target, LOG), lambda: move_worker(None, target, LOG, ANSWERS)):
        with pytest.raises(ProtocolError, match=rf"offset {target} is not in the log: it begins at 10 and ends at 100"):
            move()


@given(st.integers(10, 5000), st.sets(st.integers(0, 4000)), st.integers(0, 5000))
def test_metadata_stays_below_the_brokers_limit_and_nothing_finished_is_forgotten(offset, above, target):
    log, target = LogRange(0, 10_000), min(target, 9000)
    finished = {offset + at for at in above}
    position = Position(offset=offset, epoch=3, read_from=50, finished=frozenset(finished))
    text = encode_metadata(position)
    move = move_worker(Committed(offset=offset, metadata=text), target, log, LogRange(1, 99_999))
    assert len(move.metadata) <= MAX_METADATA_BYTES
    known = decode_metadata(target, move.metadata)
    assert known.epoch == 3
    kept = {at for at in finished if at >= target}
    # Where they are not named, the log is read from where they can be found.
    assert known.finished == kept or known.read_from == 1
    if target < offset:
        assert known.read_from == 1
