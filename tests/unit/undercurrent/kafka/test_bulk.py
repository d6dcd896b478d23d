"""While a client sends a large cycle its caller has the time; a small one is waited for."""

from __future__ import annotations

import threading

import pytest

from undercurrent.kafka.bulk import BulkPublisher, Outgoing
from undercurrent.kafka.records import Partition
from undercurrent.kafka.settings import KafkaSettings

WHERE = Partition("t", 0)
SMALL, LARGE = {WHERE: [Outgoing(b"k", b"v")]}, {WHERE: [Outgoing(b"k", bytes(300_000))] * 4}


class Client:
    """Sends what it has when its caller has done something else meanwhile, or at once."""

    def __init__(self, until=None):
        self.until, self.flushed, self.threads = until, 0, set()

    def produce_batch(self, topic, messages, partition, on_delivery):
        return len(messages)

    def flush(self, seconds):
        self.flushed += 1
        self.threads.add(threading.get_ident())
        return 0 if self.until is None or self.until.wait(20) else 1

    def close(self):
        pass


@pytest.fixture
def publisher():
    made = BulkPublisher(KafkaSettings(bootstrap_servers="127.0.0.1:1"), look_s=0.01)
    yield made
    made.close()


def test_a_large_cycle_is_sent_while_its_caller_does_something_else(publisher):
    done = threading.Event()
    publisher._producer = client = Client(until=done)
    assert publisher.write(LARGE, waiting=lambda _: done.set()) == []
    assert (client.flushed, client.threads & {threading.get_ident()}) == (1, set())


def test_a_small_cycle_is_sent_without_another_thread_and_nobody_is_called_for_it(publisher):
    publisher._producer = client = Client()
    calls = []
    publisher.write(SMALL, waiting=calls.append)
    publisher.write(SMALL, waiting=calls.append)
    assert (calls, client.flushed, client.threads) == ([], 2, {threading.get_ident()})


def test_what_the_caller_raises_ends_the_wait_when_the_client_has_stopped_sending(publisher):
    publisher._producer = client = Client()

    def fail(_):
        raise KeyError("nobody")

    with pytest.raises(KeyError):
        publisher.write(LARGE, waiting=fail)
    assert client.flushed == 1
    publisher.write(SMALL)
    assert client.flushed == 2
