from __future__ import annotations

import pytest

from producer.client import PromptProducer, SubmitError
from producer.prompts import Prompt
from producer.settings import ProducerSettings
from tests.unit.producer.kafka_double import CODEC, GENERATIONS, Connection, Log, Worker
from undercurrent.errors import ConfigError, TopicError, UnreachableError
from undercurrent.kafka.publisher import DeliveryError
from undercurrent.kafka.records import Partition
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.messages import GenerationKind, Label, LabelValue, Outcome
from undercurrent.topics import partition_of

FULL = DeliveryError("_QUEUE_FULL", "the client's buffer is full", fatal=False)


def settings(**fields: object) -> ProducerSettings:
    return ProducerSettings.model_validate(
        {"kafka": KafkaSettings(bootstrap_servers="nowhere:1"), "send_timeout_s": 0.2, **fields}
    )


def producer_on(log: Log, **fields: object) -> PromptProducer:
    return PromptProducer(settings(**fields), connection=Connection(log), now_us=lambda: 5)


def test_a_prompt_stands_under_its_id_in_the_partition_of_its_id() -> None:
    log = Log(partitions=5)
    with producer_on(log) as producer:
        ids = [producer.submit(f"text {i}", max_tokens=i + 1) for i in range(20)]
    found = {message.request_id: (record, message) for record, message in log.prompts()}
    assert sorted(found) == sorted(ids)
    for request_id, (record, message) in found.items():
        assert record.key == request_id.encode()
        assert record.partition == partition_of(request_id, 5)
        assert message.created_at_us == 5
    assert [found[request_id][1].sampling.max_tokens for request_id in ids] == list(range(1, 21))


def test_a_given_id_is_kept_and_a_whole_prompt_may_be_handed_over() -> None:
    log = Log()
    with producer_on(log) as producer:
        assert producer.submit("a", request_id="mine") == "mine"
        assert producer.submit(Prompt(prompt_token_ids=(1, 2), request_id="ids")) == "ids"
    assert {message.request_id for _, message in log.prompts()} == {"mine", "ids"}


def test_labels_go_to_the_topic_of_labels_and_never_to_an_engine() -> None:
    log = Log()
    with producer_on(log) as producer:
        producer.submit("a", request_id="r1", labels={"bad": "positive", "long": "unknown"}, label_source="ann")
        with pytest.raises(ConfigError, match=r"labels\.bad: .*'positive', 'negative' or 'unknown'"):
            producer.submit("a", labels={"bad": "yes"})
    found = [
        record for where, records in log.records.items() if where.topic == "undercurrent.labels" for record in records
    ]
    assert [(record.key, CODEC.decode(record.value)) for record in found] == [
        (
            f"r1|{name}|ann".encode(),
            Label(request_id="r1", name=name, value=LabelValue(value), source="ann", created_at_us=5),
        )
        for name, value in (("bad", "positive"), ("long", "unknown"))
    ]
    assert len(log.prompts()) == 1
    log.fail = lambda key: DeliveryError("_MSG_TIMED_OUT", "late", fatal=False) if b"|" in key else None
    with producer_on(log) as producer:
        producer.submit("b", request_id="r2", labels={"bad": "negative"})
        with pytest.raises(SubmitError, match=r"r2\|bad\|prompt: late"):
            producer.flush()


def test_a_wrong_field_is_named() -> None:
    with producer_on(Log()) as producer, pytest.raises(ConfigError, match="max_tokens"):
        producer.submit("a", max_tokens=0)


def test_a_full_buffer_is_waited_for() -> None:
    log, refusals = Log(), iter([FULL, FULL, None])
    log.refuse = lambda key: next(refusals)
    with producer_on(log) as producer:
        producer.submit("a")
    assert len(log.prompts()) == 1


def test_a_buffer_that_stays_full_ends_in_unreachable_with_the_id() -> None:
    log = Log()
    log.refuse = lambda key: FULL
    with producer_on(log) as producer, pytest.raises(UnreachableError, match="no room for prompt r"):
        producer.submit("a", request_id="r")


def test_a_prompt_that_the_client_refuses_is_named() -> None:
    log = Log()
    log.refuse = lambda key: DeliveryError("MSG_SIZE_TOO_LARGE", "too large", fatal=False)
    with producer_on(log) as producer:
        with pytest.raises(SubmitError) as caught:
            producer.submit("a", request_id="r")
        assert caught.value.request_id == "r"
        assert producer.failed == {"r": "too large"}
        assert producer.pending == 0


def test_a_failed_delivery_is_raised_by_flush_and_the_others_arrive() -> None:
    log = Log()
    log.fail = lambda key: DeliveryError("MSG_SIZE_TOO_LARGE", "too large", fatal=False) if key == b"big" else None
    with producer_on(log) as producer:
        producer.submit("a", request_id="big")
        producer.submit("b", request_id="small")
        with pytest.raises(SubmitError, match="too large"):
            producer.flush()
        assert producer.failed == {"big": "too large"}
        producer.follower(["small"])
        with pytest.raises(SubmitError, match="too large"):
            producer.follower(["big"])


def test_what_is_never_acknowledged_ends_in_unreachable() -> None:
    log = Log()
    log.acknowledge = False
    with producer_on(log) as producer:
        producer.submit("a")
        assert producer.pending == 1
        with pytest.raises(UnreachableError, match="not acknowledged"):
            producer.flush()


def test_follow_yields_the_text_and_ends_with_the_final() -> None:
    log = Log()
    with producer_on(log) as producer:
        request_id = producer.submit("a")
        worker = Worker(log, log.prompts()[0][0])
        worker.accept()
        worker.tokens("one ")
        worker.tokens("two")
        worker.final(" three")
        events = list(producer.follow([request_id], timeout_s=5))
    assert "".join(event.text for event in events) == "one two three"
    assert events[-1].outcome is Outcome.COMPLETED


def test_follow_takes_only_the_holder_of_the_attempt() -> None:
    log = Log()
    with producer_on(log) as producer:
        request_id = producer.submit("a")
        record = log.prompts()[0][0]
        zombie, heir = Worker(log, record, incarnation=7), Worker(log, record, incarnation=9)
        zombie.accept(attempt=1)
        zombie.tokens("old", attempt=1)
        heir.accept(attempt=2)
        zombie.tokens("never", attempt=1)
        zombie.final("never", attempt=1)
        heir.tokens("new", attempt=2)
        heir.final(attempt=2)
        zombie.final("late", attempt=1)
        events = list(producer.follow([request_id], timeout_s=5))
    assert [(event.attempt, event.text) for event in events] == [(1, "old"), (2, "new"), (2, "")]


def test_follow_waits_for_every_child_and_every_request() -> None:
    log = Log()
    with producer_on(log) as producer:
        ids = [producer.submit("a", n=2), producer.submit("b")]
        records = {message.request_id: record for record, message in log.prompts()}
        first, second = (Worker(log, records[request_id]) for request_id in ids)
        steps = iter(
            [
                lambda: first.accept(n=2),
                lambda: first.final(index=1),
                second.accept,
                second.final,
                lambda: first.final(index=0),
            ]
        )
        log.on_idle = lambda: next(steps)()
        events = list(producer.follow(ids, timeout_s=5))
    assert [(event.request_id, event.index) for event in events] == [(ids[0], 1), (ids[1], 0), (ids[0], 0)]


def test_follow_of_a_request_sent_elsewhere_reads_the_log_from_its_start() -> None:
    log = Log()
    with producer_on(log) as sender:
        request_id = sender.submit("a")
    worker = Worker(log, log.prompts()[0][0])
    worker.accept()
    worker.final("done before")
    with producer_on(log) as producer:
        assert [event.text for event in producer.follow([request_id], timeout_s=5)] == ["done before"]


def test_a_duplicate_of_a_finished_request_gets_the_first_ones_result() -> None:
    log = Log(partitions=1)
    with producer_on(log) as sender:
        sender.submit("a", request_id="r")
        sender.submit("other", request_id="other")
    for record, _ in log.prompts():
        worker = Worker(log, record)
        worker.accept()
        worker.final(f"result of {record.key!r}")
    with producer_on(log) as producer:
        producer.submit("a", request_id="r")
        Worker(log, log.prompts()[-1][0]).event(GenerationKind.DUPLICATE)
        events = list(producer.follow(["r"], timeout_s=5))
    assert [event.kind for event in events] == [GenerationKind.DUPLICATE, GenerationKind.FINAL]
    assert events[-1].text == "result of b'r'"


def test_a_refused_prompt_ends_and_a_refusal_of_somebody_elses_does_not() -> None:
    log = Log()
    with producer_on(log) as producer:
        producer.submit("a", request_id="r")
        mine = log.prompts()[0][0]
        others = mine._replace(offset=mine.offset + 1)
        Worker(log, others).event(GenerationKind.REFUSED, error="other content")
        Worker(log, mine).event(GenerationKind.REFUSED, error="yours")
        events = list(producer.follow(["r"], timeout_s=5))
    assert [event.error for event in events] == ["yours"]


def test_silence_ends_in_unreachable_that_says_that_no_worker_accepted() -> None:
    with producer_on(Log()) as producer:
        request_id = producer.submit("a")
        with pytest.raises(UnreachableError, match="1 of them not accepted"):
            list(producer.follow([request_id], timeout_s=0.0))


def test_an_undecodable_record_is_passed_over() -> None:
    log = Log()
    with producer_on(log) as producer:
        request_id = producer.submit("a")
        record = log.prompts()[0][0]
        log.append(GENERATIONS, record.partition, request_id.encode(), b"\x00rubbish")
        worker = Worker(log, record)
        worker.accept()
        worker.final("good")
        assert [event.text for event in producer.follow([request_id], timeout_s=5)] == ["good"]


def test_a_log_that_retention_cut_is_read_on_from_its_start() -> None:
    log = Log()
    with producer_on(log) as producer:
        request_id = producer.submit("a")
        record = log.prompts()[0][0]
        where = Partition(GENERATIONS, record.partition)
        for _ in range(3):
            log.append(GENERATIONS, record.partition, b"somebody", b"else")
        log.retained[where] = 3
        worker = Worker(log, record)
        worker.accept()
        worker.final("good")
        assert [event.text for event in producer.follow([request_id], timeout_s=5)] == ["good"]


def test_readers_are_closed_also_when_the_caller_stops_early() -> None:
    log = Log()
    connection = Connection(log)
    with PromptProducer(settings(), connection=connection) as producer:
        request_id = producer.submit("a")
        worker = Worker(log, log.prompts()[0][0])
        worker.accept()
        worker.tokens("x")
        events = producer.follow([request_id], timeout_s=5)
        next(events)
        events.close()  # type: ignore[attr-defined]
    assert [reader.closed for reader in connection.readers] == [True]
    assert connection.writer.closed


@pytest.mark.parametrize(
    ("log", "fields", "says"),
    [
        (Log(partitions=4), {"prompt_partitions": 8}, "has 4 partitions, the configuration says 8"),
        (Log(partitions=4, answers=3), {}, "must be equal"),
    ],
)
def test_partition_counts_that_do_not_fit_are_refused(log: Log, fields: dict[str, object], says: str) -> None:
    with pytest.raises(TopicError, match=says):
        producer_on(log, **fields)
