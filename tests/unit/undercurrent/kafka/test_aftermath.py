"""What a writer may have left open in the logs is ended by the next one of its id."""

from __future__ import annotations

import pytest

from undercurrent.errors import AbortableTransactionError, TopicError
from undercurrent.kafka.aftermath import Aftermath, Logs, partitions_of
from undercurrent.kafka.records import Partition

BESIDE = Partition("rollouts", 0)
LOGS = Logs(partitions=[("verdicts", 0), ("verdicts", 1), ("states", 0)], key=b"k", value=b"v", beside=BESIDE)


class Writer:
    transactional_id = "id"

    def __init__(self):
        self.calls = []

    def begin(self):
        self.calls.append("begin")

    def produce(self, topic, value, *, key, partition):
        self.calls.append((topic, partition, key, value))

    def send_offsets(self, offsets, group_metadata):
        self.calls.append((offsets, group_metadata))

    def flush(self):
        self.calls.append("flush")

    def abort(self):
        self.calls.append("abort")


def test_what_is_left_is_aborted_in_every_log():
    aftermath, writer = Aftermath(due=True), Writer()
    aftermath.settle(writer, LOGS, "generation", lambda call: call())
    written = [("verdicts", 0, b"k", b"v"), ("verdicts", 1, b"k", b"v"), ("states", 0, b"k", b"v")]
    assert writer.calls == ["begin", *written, ({BESIDE: (0, None)}, "generation"), "flush", "abort"]
    assert not aftermath.due


def test_a_topic_that_is_not_there_has_nothing_open():
    class Lookup:
        def partitions(self, topic):
            if topic == "gone":
                raise TopicError("there is no such topic")
            return [Partition(topic, 0), Partition(topic, 1)]

    assert list(partitions_of(Lookup(), ["gone", "states"])) == [("states", 0), ("states", 1)]


def test_it_stays_due_until_it_is_done():
    aftermath, writer = Aftermath(due=True), Writer()

    def fails(call):
        raise AbortableTransactionError("another generation")

    with pytest.raises(AbortableTransactionError):
        aftermath.settle(writer, LOGS, "generation", fails)
    assert aftermath.due
