from concurrent.futures import Future

import pytest
from confluent_kafka import KafkaError, KafkaException

from undercurrent.errors import NotAllowedError, TopicError, UnreachableError
from undercurrent.kafka.asking import Asking
from undercurrent.kafka.client import KafkaSettings

THERE = KafkaError.TOPIC_ALREADY_EXISTS


def answer(value=None, code=None):
    future = Future()
    if code is None:
        future.set_result(value)
    else:
        future.set_exception(KafkaException(KafkaError(code, "as it says")))
    return future


@pytest.fixture
def ask():
    return Asking(KafkaSettings(bootstrap_servers="127.0.0.1:1"), 0.1)


def test_an_answer_is_handed_over(ask):
    assert ask.result(answer(3), "it cannot be asked") == 3


@pytest.mark.parametrize("refused", [TopicError, NotAllowedError])
def test_what_brokers_refuse_is_the_callers_error_and_the_client_stays(refused):
    ask = Asking(KafkaSettings(bootstrap_servers="127.0.0.1:1"), 0.1, refused=refused)
    client = ask.client
    with pytest.raises(refused, match=r"it cannot be done: .*as it says"):
        ask.result(answer(code=KafkaError.POLICY_VIOLATION), "it cannot be done")
    assert ask.client is client


def test_a_client_that_reaches_nobody_is_replaced(ask):
    client = ask.client
    with pytest.raises(UnreachableError, match=r"it cannot be done: .*as it says"):
        ask.result(answer(code=KafkaError._TRANSPORT), "it cannot be done")
    assert ask.client is not client


def test_an_answer_that_does_not_come_is_not_waited_for(ask, monkeypatch):
    monkeypatch.setattr("undercurrent.kafka.asking._LATE_S", 0.0)
    client = ask.client
    with pytest.raises(UnreachableError, match=r"it cannot be done: no answer in 0\.1 s"):
        ask.result(Future(), "it cannot be done")
    assert ask.client is not client


def test_what_was_so_before_is_done(ask):
    ask.done(answer(), "it cannot be done", unless=THERE)
    ask.done(answer(code=THERE), "it cannot be done", unless=THERE)
    with pytest.raises(TopicError, match="it cannot be done"):
        ask.done(answer(code=KafkaError.POLICY_VIOLATION), "it cannot be done", unless=THERE)
    with pytest.raises(UnreachableError, match="it cannot be done"):
        ask.done(answer(code=KafkaError._TRANSPORT), "it cannot be done", unless=THERE)
