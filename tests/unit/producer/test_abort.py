"""An operator's commands, and the answers to them, on a log in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from producer.abort import Aborter, AbortError
from producer.abort_cli import answer_line
from producer.settings import ProducerSettings
from tests.unit.producer.kafka_double import CODEC, Connection, Log
from undercurrent.errors import ConfigError, TopicError, UnreachableError
from undercurrent.kafka.publisher import DeliveryError
from undercurrent.kafka.records import Partition
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.messages import AckOutcome, CommandKind, CommandSource, ControlAck, ControlCommand

CONTROL, ACKS = Partition("undercurrent.control", 0), Partition("undercurrent.control.acks", 0)


@pytest.fixture
def log() -> Log:
    made = Log()
    made.counts |= {CONTROL.topic: 1, ACKS.topic: 1}
    return made


def aborter(log: Log, send_timeout_s: float = 5.0) -> Aborter:
    settings = ProducerSettings(kafka=KafkaSettings(bootstrap_servers="nowhere:1"), send_timeout_s=send_timeout_s)
    return Aborter(settings, connection=Connection(log), now_us=lambda: 7_000)


def answer(log: Log, command: ControlCommand, outcome: AckOutcome, **fields: object) -> None:
    ack = ControlAck(
        command_id=command.command_id,
        request_id=command.request_id,
        engine="engine-0",
        incarnation=1,
        outcome=outcome,
        received_at_us=8_000,
    )
    log.append(*ACKS, command.request_id.encode(), CODEC.encode(replace(ack, **fields)))


def test_a_command_is_an_operators_names_no_attempt_and_is_keyed_by_its_request(log: Log) -> None:
    command = aborter(log).send("r-1", reason="asked for", index=2)
    (record,) = log.records[CONTROL]
    assert record.key == b"r-1"
    assert CODEC.decode(record.value) == command
    assert (command.kind, command.source, command.attempt) == (CommandKind.ABORT, CommandSource.OPERATOR, None)
    assert (command.index, command.reason, command.issued_at_us, command.decided_at_us) == (
        2,
        "asked for",
        7_000,
        7_000,
    )


def test_two_commands_for_a_request_are_two(log: Log) -> None:
    made = aborter(log)
    assert made.send("r", reason="x").command_id != made.send("r", reason="x").command_id


def test_the_first_answer_that_counts_is_told_and_unknown_is_not_the_last_word(log: Log) -> None:
    made = aborter(log)
    commands = [made.send(name, reason="x") for name in ("r", "s")]
    other = replace(commands[0], command_id="another's")
    log.append(*ACKS, b"r", b"no message")
    answer(log, other, AckOutcome.ALREADY)
    answer(log, commands[0], AckOutcome.UNKNOWN)
    answer(log, commands[1], AckOutcome.TOO_LATE)
    log.on_idle = lambda: answer(log, commands[0], AckOutcome.APPLIED)
    told = [(ack.request_id, ack.outcome) for ack in made.answers(commands, 60.0)]
    assert told == [("r", AckOutcome.UNKNOWN), ("s", AckOutcome.TOO_LATE), ("r", AckOutcome.APPLIED)]


def test_an_answer_from_before_is_not_read(log: Log) -> None:
    for _ in range(3):
        log.append(*ACKS, b"old", b"old")
    connection = Connection(log)
    settings = ProducerSettings(kafka=KafkaSettings(bootstrap_servers="nowhere:1"))
    made = Aborter(settings, connection=connection)
    command = made.send("r", reason="x")
    answer(log, command, AckOutcome.APPLIED)
    assert len(list(made.answers([command], 60.0))) == 1
    (reader,) = connection.readers
    assert (reader.positions, reader.closed) == ({ACKS: 4}, True)


def test_nobody_waits_longer_than_was_said(log: Log) -> None:
    made = aborter(log)
    assert list(made.answers([made.send("r", reason="x")], 0.01)) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"request_id": "", "reason": "x"}, "request id"),
        ({"request_id": "r", "reason": " "}, "reason: is empty"),
        ({"request_id": "r", "reason": "x" * 1001}, "reason: has 1001 characters; at most 1000"),
        ({"request_id": "r", "reason": "x", "index": -1}, "index: -1"),
    ],
)
def test_what_makes_no_command_is_named(log: Log, fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        aborter(log).send(**fields)  # type: ignore[arg-type]
    assert log.records[CONTROL] == []


def test_a_command_that_the_broker_refuses_or_does_not_take_is_an_error_that_names_the_request(log: Log) -> None:
    log.fail = lambda _: DeliveryError("TOPIC_AUTHORIZATION_FAILED", "not allowed", fatal=False)
    with pytest.raises(AbortError, match="abort of r: not allowed"):
        aborter(log).send("r", reason="x")
    log.refuse = lambda _: DeliveryError("MSG_SIZE_TOO_LARGE", "too large", fatal=False)
    with pytest.raises(AbortError, match="abort of r: too large"):
        aborter(log).send("r", reason="x")


def test_a_command_without_an_acknowledgement_says_that_it_may_have_arrived(log: Log) -> None:
    log.acknowledge = False
    with pytest.raises(UnreachableError, match=r"not acknowledged in 0\.01 s; it may have arrived"):
        aborter(log, send_timeout_s=0.01).send("r", reason="x")


def test_control_topics_of_several_partitions_are_refused(log: Log) -> None:
    log.counts[CONTROL.topic] = 3
    with pytest.raises(TopicError, match=r"undercurrent\.control has 3 partitions"):
        aborter(log)


@pytest.mark.parametrize(
    ("outcome", "fields", "line"),
    [
        (
            AckOutcome.APPLIED,
            {"attempt": 3, "token_index": 17, "applied_at_us": 19_000},
            "r: applied by engine-0 after 17 tokens of attempt 3, 12 ms after the command",
        ),
        (AckOutcome.APPLIED, {"applied_at_us": 6_000}, "r: applied by engine-0 after 0 tokens"),
        (AckOutcome.ALREADY, {}, "r: already stopped by another command"),
        (AckOutcome.TOO_LATE, {}, "r: too late: it had ended before"),
        (AckOutcome.STALE, {}, "r: stale: it was over long before"),
        (AckOutcome.UNKNOWN, {}, "r: unknown: engine-0 has read every prompt"),
        (AckOutcome.HELD_OUT, {}, "r: held_out, says engine-0"),
    ],
)
def test_each_outcome_is_told_in_words(log: Log, outcome: AckOutcome, fields: dict[str, object], line: str) -> None:
    command = aborter(log).send("r", reason="x")
    answer(log, command, outcome, **fields)
    (record,) = log.records[ACKS]
    ack = CODEC.decode(record.value)
    assert isinstance(ack, ControlAck)
    assert answer_line(command, ack).startswith(line)
