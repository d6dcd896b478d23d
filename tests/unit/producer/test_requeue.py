"""A failed request runs again under a new id; no other does."""

from __future__ import annotations

import pytest

from producer.client import PromptProducer
from tests.unit.producer.kafka_double import Connection, Log, Worker
from tests.unit.producer.test_client import settings
from undercurrent.errors import UnreachableError
from undercurrent.kafka.records import Partition
from undercurrent.protocol.messages import Outcome
from undercurrent.protocol.requeue import RequeueError, next_id
from undercurrent.topics import MAX_REQUEST_ID_BYTES, partition_of


@pytest.fixture
def sent() -> tuple[Log, Connection, PromptProducer, Worker]:
    """A request `r` with two children, and the worker that owns it."""
    log = Log()
    connection = Connection(log)
    producer = PromptProducer(settings(), connection=connection, now_us=lambda: 9)
    producer.submit("text", request_id="r", n=2, deadline_s=1.0, metadata={"case": "7"})
    producer.submit("other", request_id="beside it")
    worker = Worker(log, next(record for record, message in log.prompts() if message.request_id == "r"))
    return log, connection, producer, worker


def test_a_failed_request_runs_again_under_its_next_id(sent: tuple[Log, Connection, PromptProducer, Worker]) -> None:
    log, connection, producer, worker = sent
    worker.accept(n=2)
    worker.final(index=0, outcome=Outcome.FAILED, finish_reason="engine_lost")
    worker.final(index=1, outcome=Outcome.FAILED, finish_reason="engine_lost")
    assert producer.requeue("r") == "r~2"
    first, again = (m for _, m in log.prompts() if m.request_id in ("r", "r~2"))
    if first.request_id != "r":
        first, again = again, first
    assert (again.prompt, again.sampling) == (first.prompt, first.sampling)
    assert (first.deadline_us is not None, again.deadline_us) == (True, None)
    assert dict(again.metadata) == {"case": "7", "requeued_from": "r"}
    assert all(reader.closed for reader in connection.readers)


@pytest.mark.parametrize(
    ("outcomes", "says"),
    [
        ((), "has not ended"),
        ((Outcome.FAILED,), "has not ended"),
        ((Outcome.COMPLETED, Outcome.COMPLETED), "ended as completed; only a failed request"),
        ((Outcome.FAILED, Outcome.ABORTED), "ended as aborted, failed"),
    ],
)
def test_one_that_has_not_failed_is_refused(
    sent: tuple[Log, Connection, PromptProducer, Worker], outcomes: tuple[Outcome, ...], says: str
) -> None:
    log, _, producer, worker = sent
    worker.accept(n=2)
    for index, outcome in enumerate(outcomes):
        worker.final(index=index, outcome=outcome)
    with pytest.raises(RequeueError, match=rf"^request r: .*{says}"):
        producer.requeue("r")
    assert len(log.prompts()) == 2


def test_one_whose_prompt_is_gone_is_refused(sent: tuple[Log, Connection, PromptProducer, Worker]) -> None:
    log, _, producer, worker = sent
    worker.accept(n=1)
    worker.final(outcome=Outcome.FAILED)
    number = partition_of("r", 4)
    where = Partition("undercurrent.prompts", number)
    log.retained[where] = len(log.records[where])
    with pytest.raises(RequeueError, match="send it anew"):
        producer.requeue("r")


def test_a_log_that_does_not_come_ends_in_an_error(sent: tuple[Log, Connection, PromptProducer, Worker]) -> None:
    log, connection, producer, worker = sent
    worker.accept(n=1)
    ends = connection.lookup.end
    connection.lookup.end = lambda partitions: {where: end + 1 for where, end in ends(partitions).items()}
    with pytest.raises(UnreachableError, match="was not read beyond offset"):
        producer.requeue("r")
    assert len(log.prompts()) == 2


def test_ids_are_counted_on() -> None:
    assert [next_id(name) for name in ("r", "r~2", "r~9", "a~b", "a~01", "~3")] == [
        "r~2",
        "r~3",
        "r~10",
        "a~b~2",
        "a~01~2",
        "~4",
    ]
    assert next_id("x" * (MAX_REQUEST_ID_BYTES - 2)).endswith("x~2")
    with pytest.raises(RequeueError, match="longer than"):
        next_id("x" * (MAX_REQUEST_ID_BYTES - 1))
