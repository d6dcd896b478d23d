"""Which commands bind a request."""

from __future__ import annotations

from undercurrent.protocol.control import ControlBook
from undercurrent.protocol.messages import AckOutcome, CommandKind, CommandSource, ControlAck, ControlCommand


def command(name, attempt=None, kind=CommandKind.ABORT):
    source = CommandSource.OPERATOR if attempt is None else CommandSource.PROBE
    return ControlCommand(command_id=name, kind=kind, request_id="r", attempt=attempt, source=source, issued_at_us=0)


def ack(name, outcome):
    return ControlAck(command_id=name, request_id="r", engine="e", incarnation=1, outcome=outcome, received_at_us=0)


def test_an_operators_command_binds_every_attempt_until_it_is_answered():
    book = ControlBook()
    assert book.add(command("c"), 7).received_at_us == 7
    assert book.binding("r").message.command_id == "c"
    book.answered(ack("c", AckOutcome.TOO_LATE))
    assert book.binding("r") is None


def test_a_probes_command_binds_no_further_attempt():
    book = ControlBook()
    book.add(command("c", attempt=1), 0)
    assert book.binding("r") is None


def test_unknown_is_no_answer():
    book = ControlBook()
    book.add(command("c"), 0)
    book.answered(ack("c", AckOutcome.UNKNOWN))
    assert not book.is_answered("c")
    assert book.binding("r") is not None


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
    assert book.binding("r") is None
