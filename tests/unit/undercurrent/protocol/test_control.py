"""Which commands bind a request."""

from __future__ import annotations

import pytest

from undercurrent.protocol.control import ControlBook
from undercurrent.protocol.messages import AckOutcome, CommandKind, CommandSource, ControlAck, ControlCommand


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
    book = ControlBook()
    assert book.add(command("c"), 7).received_at_us == 7
    assert book.binding("r", 1).message.command_id == "c"
    book.answered(ack("c", AckOutcome.TOO_LATE))
    assert book.binding("r", 1) is None


def test_a_probes_command_binds_no_further_attempt():
    book = ControlBook()
    book.add(command("c", attempt=1), 0)
    assert book.binding("r", 1) is None


@pytest.mark.parametrize(("index", "children", "binds"), [(None, 3, True), (0, 1, True), (0, 3, False), (3, 3, False)])
def test_a_command_for_one_of_several_children_does_not_bind_the_request(index, children, binds):
    book = ControlBook()
    book.add(command("c", index=index), 0)
    assert (book.binding("r", children) is not None) is binds


def test_unknown_is_no_answer():
    book = ControlBook()
    book.add(command("c"), 0)
    book.answered(ack("c", AckOutcome.UNKNOWN))
    assert not book.is_answered("c")
    assert book.binding("r", 1) is not None


def test_a_command_is_acted_on_once_whatever_comes_first():
    book = ControlBook()
    assert book.add(command("c"), 0) is not None
    assert book.add(command("c"), 0) is None
    book.answered(ack("d", AckOutcome.ALREADY))
    assert book.add(command("d"), 0) is None
    assert book.add(command("e", kind=CommandKind.UNKNOWN), 0) is None
    assert [c.message.command_id for c in book.unanswered()] == ["c"]


def test_a_finished_requests_answered_commands_are_forgotten():
    book = ControlBook()
    book.add(command("c"), 0)
    book.add(command("d"), 0)
    book.answered(ack("c", AckOutcome.APPLIED))
    book.forget("r")
    assert [c.message.command_id for c in book.unanswered("r")] == ["d"]
    book.answered(ack("d", AckOutcome.ALREADY))
    book.forget("r")
    assert book.binding("r", 1) is None
