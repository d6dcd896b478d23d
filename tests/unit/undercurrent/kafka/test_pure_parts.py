"""What can be decided without a broker."""

from __future__ import annotations

import os
import threading
import warnings

import pytest
from confluent_kafka import KafkaError, KafkaException

from undercurrent.errors import (
    AbortableTransactionError,
    ConfigError,
    FencedError,
    RetriableTransactionError,
    StrandedError,
    TransactionError,
    UnreachableError,
)
from undercurrent.kafka import transactions
from undercurrent.kafka.admin import ActualTopic, DifferenceKind, compare
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.ranges import Piece
from undercurrent.kafka.records import Partition
from undercurrent.kafka.subscriber import GroupSubscriber
from undercurrent.kafka.transactions import TransactionalWriter, classify
from undercurrent.topics import HOUR_MS, Topic

SETTINGS = KafkaSettings(bootstrap_servers="127.0.0.1:1")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KafkaError(KafkaError._TIMED_OUT), RetriableTransactionError),
        (KafkaError(KafkaError._TIMED_OUT, retriable=True), RetriableTransactionError),
        (KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS), RetriableTransactionError),
        (KafkaError(KafkaError.ILLEGAL_GENERATION), AbortableTransactionError),
        (KafkaError(KafkaError.STALE_MEMBER_EPOCH), AbortableTransactionError),
        (KafkaError(KafkaError._TIMED_OUT, txn_requires_abort=True), AbortableTransactionError),
        (KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), AbortableTransactionError),
        (KafkaError(KafkaError._FENCED), FencedError),
        (KafkaError(KafkaError.INVALID_PRODUCER_EPOCH, txn_requires_abort=True), FencedError),
        (KafkaError(KafkaError._FATAL, fatal=True), FencedError),
        (KafkaError(KafkaError.INVALID_TXN_STATE, fatal=True), StrandedError),
        (KafkaError(KafkaError.INVALID_TXN_STATE, txn_requires_abort=True), AbortableTransactionError),
        (KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), FencedError),
    ],
)
def test_each_transaction_error_has_one_answer(error: KafkaError, kind: type[TransactionError]) -> None:
    assert type(classify(KafkaException(error))) is kind


class Ending:
    """A client that comes to its end: in its next call, in the words of `error`."""

    def __init__(self, error: KafkaError, *, midway: bool = False) -> None:
        self._error, self._midway = error, midway

    def begin_transaction(self) -> None: ...

    def commit_transaction(self, timeout: float) -> None:
        self.flush(timeout)

    def flush(self, timeout: float) -> int:
        if self._midway:
            raise SystemError("a method returned a result with an exception set") from KafkaException(self._error)
        raise KafkaException(self._error)


@pytest.mark.parametrize("midway", [False, True])
@pytest.mark.parametrize(("limit_s", "kind"), [(60.0, FencedError), (0.0, StrandedError)])
def test_who_is_fenced_in_a_transaction_that_no_broker_would_have_ended_is_replaced(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, kind: type[TransactionError], midway: bool
) -> None:
    error = KafkaError(KafkaError._FENCED, fatal=True)
    monkeypatch.setattr(transactions, "make_producer", lambda config: Ending(error, midway=midway))
    for end in (TransactionalWriter.commit, TransactionalWriter.flush):
        writer = TransactionalWriter(SETTINGS, "t", transaction_timeout_s=limit_s)
        writer.begin()
        with pytest.raises(kind, match="_FENCED"):
            end(writer)
        assert writer.in_transaction is (kind is FencedError), "what is over cannot be aborted"


def test_a_failed_transaction_names_its_first_failed_record() -> None:
    error = classify(KafkaException(KafkaError(KafkaError._FAIL)), "too large [MSG_SIZE_TOO_LARGE]")
    assert "first failed record: too large" in str(error)


def test_differences_are_found_one_by_one() -> None:
    planned = [Topic(name=name, partitions=4, retention_ms=HOUR_MS) for name in ("gone", "small", "short", "fine")]
    right = planned[0].config
    actual = {
        "small": ActualTopic("small", 3, 1, right),
        "short": ActualTopic("short", 4, 1, {**right, "retention.ms": "5"}),
        "fine": ActualTopic("fine", 4, 1, {**right, "unplanned.key": "x"}),
    }
    found = compare(planned, actual)
    assert [(d.topic, d.kind, d.key, d.planned, d.actual, d.mendable) for d in found] == [
        ("gone", DifferenceKind.MISSING, "", "4", "", True),
        ("small", DifferenceKind.PARTITIONS, "", "4", "3", False),
        ("short", DifferenceKind.CONFIG, "retention.ms", str(HOUR_MS), "5", True),
    ]


def test_fewer_copies_than_have_to_be_in_sync_are_refused() -> None:
    planned = [Topic(name="t", partitions=4, retention_ms=HOUR_MS, min_insync_replicas=2)]
    for copies, mendable in ((1, False), (2, None), (3, None)):
        found = compare(planned, {"t": ActualTopic("t", 4, copies, planned[0].config)})
        assert [item.mendable for item in found] == ([] if mendable is None else [mendable])
    (found,) = compare(planned, {"t": ActualTopic("t", 4, 1, planned[0].config)})
    assert "1 copies of each partition, and 2 have to be in sync" in str(found)


def test_a_topic_that_was_compacted_by_hand_is_a_difference() -> None:
    topic = Topic(name="t", partitions=1, retention_ms=HOUR_MS)
    found = compare([topic], {"t": ActualTopic("t", 1, 1, {**topic.config, "cleanup.policy": "compact"})})
    assert [(d.key, d.planned, d.actual) for d in found] == [("cleanup.policy", "delete", "compact")]


def test_a_topic_whose_settings_were_not_asked_for_has_only_its_count_compared() -> None:
    topic = Topic(name="t", partitions=1, retention_ms=HOUR_MS)
    assert compare([topic], {"t": ActualTopic("t", 1, 1)}) == []


def test_a_partition_is_its_tuple() -> None:
    assert {Partition("t", 3): 1}[("t", 3)] == 1
    assert str(Partition("t", 3)) == "t[3]"


def test_a_piece_of_unknown_loss_is_not_whole() -> None:
    assert Piece(Partition("t", 0), 0, 5, 0).whole
    assert not Piece(Partition("t", 0), 5, 9, None).whole


def test_a_client_that_was_carried_over_a_fork_is_refused() -> None:
    publisher = Publisher(SETTINGS)
    publisher.open()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 and later warn of the very mistake
        child = os.fork()
    if child == 0:
        try:
            publisher.produce("t", b"")
        except ConfigError:
            os._exit(17)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    publisher.close(0.0)


def test_a_publisher_gives_up_what_nobody_takes() -> None:
    publisher, failed = Publisher(SETTINGS), []
    assert publisher.close() == 0
    assert publisher.produce("t", b"1", partition=3, on_delivery=failed.append) is None
    assert publisher.in_flight("t", 3) == 1
    assert publisher.flush(0.05) == 1
    assert publisher.close(0.05) == 1
    assert [(d.partition, d.offset, d.error.code) for d in failed if d.error] == [(3, -1, "_PURGE_QUEUE")]
    assert publisher.in_flight_records == 0


def test_an_unreachable_coordinator_is_said_in_time() -> None:
    writer = TransactionalWriter(SETTINGS, "t")
    with pytest.raises(UnreachableError, match="'t' could not be taken"):
        writer.init(0.3)
    writer.close(0.1)


def test_a_writer_leaves_a_client_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    back, made = threading.Event(), list[str]()

    class Stuck:
        def begin_transaction(self) -> None:
            made.append("transaction")

        def send_offsets_to_transaction(self, *_: object) -> None:
            assert back.wait(60.0)

        def commit_transaction(self, timeout: float) -> None:
            made.append("commit")

    monkeypatch.setattr(transactions, "_LATE_S", 0.05)
    monkeypatch.setattr(transactions, "make_producer", lambda config: Stuck())
    writer = TransactionalWriter(SETTINGS, "t", call_timeout_s=0.05)
    writer.begin()
    with pytest.raises(StrandedError, match=r"has not ended after 0\.1 s"):
        writer.send_offsets({("t", 0): (1, None)}, "generation")
    assert not writer.in_transaction
    writer.close()  # waits for nothing
    back.set()
    # What a call says that does come back is heard as if there were no thread between.
    writer = TransactionalWriter(SETTINGS, "t")
    monkeypatch.setattr(Stuck, "send_offsets_to_transaction", _refused)
    writer.begin()
    with pytest.raises(AbortableTransactionError, match="ILLEGAL_GENERATION"):
        writer.send_offsets({("t", 0): (1, None)}, "generation")
    assert writer.in_transaction
    monkeypatch.setattr(Stuck, "send_offsets_to_transaction", lambda *_: made.append("offsets"))
    writer.send_offsets({("t", 0): (1, None)}, "generation")
    writer.commit()
    assert made == ["transaction", "transaction", "offsets", "commit"]


def _refused(*_: object) -> None:
    raise KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))


def test_a_member_that_is_not_open_says_so() -> None:
    class Nobody:
        def on_assigned(self, partitions: list[Partition]) -> None: ...
        def on_revoked(self, partitions: list[Partition]) -> None: ...
        def on_lost(self, partitions: list[Partition]) -> None: ...

    member = GroupSubscriber(SETTINGS, "g", ["t"], Nobody())
    assert member.assigned == frozenset()
    assert member.position(("t", 0)) is None
    with pytest.raises(RuntimeError, match="polling thread"):
        member.poll_batch(1, 0.0)
    member.close()
    member.open()
    member.close()
    with pytest.raises(UnreachableError, match="not open"):
        member.poll_batch(1, 0.0)
