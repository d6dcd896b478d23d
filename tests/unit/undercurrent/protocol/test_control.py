"""Which commands bind a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from undercurrent.codec import Codec
from undercurrent.protocol.control import ControlBook
from undercurrent.protocol.messages import AckOutcome, CommandKind, CommandSource, ControlAck, ControlCommand

KEEP_US = 1000


def command(name, attempt=None, kind=CommandKind.ABORT, index=None):
    return ControlCommand(
        command_id=name,
        kind=kind,
        request_id="r",
        attempt=attempt,
        index=index,
        source=CommandSource.OPERATOR if attempt is None else CommandSource.PROBE,
        issued_at_us=0,
    )


def ack(name, outcome):
    return ControlAck(command_id=name, request_id="r", engine="e", incarnation=1, outcome=outcome, received_at_us=0)


def test_an_operators_command_binds_every_attempt_until_it_is_answered():
    book = ControlBook(KEEP_US)
    assert book.add(command("c"), 7).received_at_us == 7
    assert book.binding("r", 1).message.command_id == "c"
    book.answered(ack("c", AckOutcome.TOO_LATE), 0)
    assert book.binding("r", 1) is None


def test_a_probes_command_binds_no_further_attempt():
    book = ControlBook(KEEP_US)
    book.add(command("c", attempt=1), 0)
    assert book.binding("r", 1) is None


@pytest.mark.parametrize(("index", "children", "binds"), [(None, 3, True), (0, 1, True), (0, 3, False), (3, 3, False)])
def test_a_command_for_one_of_several_children_does_not_bind_the_request(index, children, binds):
    book = ControlBook(KEEP_US)
    book.add(command("c", index=index), 0)
    assert (book.binding("r", children) is not None) is binds


def test_unknown_is_no_answer():
    book = ControlBook(KEEP_US)
    book.add(command("c"), 0)
    book.answered(ack("c", AckOutcome.UNKNOWN), 0)
    assert not book.is_answered("c")
    assert book.is_told_unknown("c")
    assert book.binding("r", 1) is not None
    book.expire(KEEP_US + 1)
    assert (book.is_told_unknown("c"), len(book)) == (False, 0)


def test_a_command_is_acted_on_once_whatever_comes_first():
    book = ControlBook(KEEP_US)
    assert book.add(command("c"), 0) is not None
    assert book.add(command("c"), 0) is None
    book.answered(ack("d", AckOutcome.ALREADY), 0)
    assert book.add(command("d"), 0) is None
    assert book.add(command("e", kind=CommandKind.UNKNOWN), 0) is None
    assert [c.message.command_id for c in book.unanswered()] == ["c"]


def test_a_finished_requests_answered_commands_are_forgotten():
    book = ControlBook(KEEP_US)
    book.add(command("c"), 0)
    book.add(command("d"), 0)
    book.answered(ack("c", AckOutcome.APPLIED), 0)
    book.forget("r")
    assert [c.message.command_id for c in book.unanswered("r")] == ["d"]
    book.answered(ack("d", AckOutcome.ALREADY), 0)
    book.forget("r")
    assert book.binding("r", 1) is None


@pytest.mark.parametrize("answer_first", [True, False])
def test_what_has_left_the_control_topic_is_forgotten_whichever_was_read_first(answer_first):
    book = ControlBook(KEEP_US)
    steps = [lambda at: book.add(command("c"), at), lambda at: book.answered(ack("c", AckOutcome.APPLIED), at)]
    for at_us, step in enumerate(reversed(steps) if answer_first else steps):
        step(at_us)
    book.expire(KEEP_US)
    assert len(book) == 2
    # At no moment between does the command look as if nobody had answered it.
    book.expire(KEEP_US + 1)
    assert list(book.unanswered()) == []
    book.expire(KEEP_US + 2)
    assert len(book) == 0


def test_a_command_that_nobody_answers_binds_as_long_as_a_new_worker_would_read_it():
    book = ControlBook(KEEP_US)
    book.add(command("c"), 5)
    book.expire(KEEP_US + 5)
    assert book.binding("r", 1) is not None
    book.expire(KEEP_US + 6)
    assert (book.binding("r", 1), len(book)) == (None, 0)


def test_memory_is_bounded_however_many_commands_are_answered():
    book = ControlBook(KEEP_US)
    most = 0
    for number in range(5 * KEEP_US):
        book.add(command(f"c{number}"), number)
        book.answered(ack(f"c{number}", AckOutcome.STALE), number)
        book.expire(number)
        most = max(most, len(book))
    assert most <= 2 * (KEEP_US + 1)


def test_a_command_counts_only_where_a_topic_takes_its_answer():
    """A record that is refused ends the worker that writes it, and every one that takes its place."""
    taken = []
    for size in (1, 1024, 40_000, 260_000, 270_000, 600_000):
        asked = replace(command("c" * 1024), request_id="\u00e9" * (size // 2) or "r", probe="p" * 1024)
        known = ControlBook(KEEP_US).add(asked, 0)
        if known is not None:
            answer = known.answer(AckOutcome.UNKNOWN, engine="e" * 200, incarnation=1)
            assert len(Codec().encode(answer)) + len(asked.request_id.encode()) < 1_000_000
            taken.append(size)
    assert taken == [1, 1024, 40_000, 260_000]
