"""A partition whose next record has a schema that is not known yet stands still, alone, and loses nothing by it."""

from __future__ import annotations

from collections import deque

from undercurrent.kafka.fetching import Fetching
from undercurrent.kafka.gate import Gate
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.kafka.registry import Registry, RegistrySettings
from undercurrent.kafka.settings import KafkaSettings

SETTINGS = KafkaSettings(bootstrap_servers="127.0.0.1:1")
HERE, THERE = Partition("t", 0), Partition("t", 1)


class Message:
    def __init__(self, where, offset, value):
        self._fields = (where[0], where[1], offset, value)

    def error(self):
        return None

    def topic(self):
        return self._fields[0]

    def partition(self):
        return self._fields[1]

    def offset(self):
        return self._fields[2]

    def value(self):
        return self._fields[3]

    def key(self):
        return b"k"

    def timestamp(self):
        return (1, 5)

    def headers(self):
        return None


class Broker:
    """A client and its broker in one: delivers what is assigned and not paused, from where it stands."""

    def __init__(self, logs):
        self.logs = logs
        self.stands: dict[Partition, int] = {}
        self.paused: set[Partition] = set()
        self.fetched: deque[Message] = deque()

    def incremental_assign(self, listed):
        for item in listed:
            self.stands[Partition(item.topic, item.partition)] = item.offset

    def incremental_unassign(self, listed):
        for item in listed:
            self.stands.pop(Partition(item.topic, item.partition), None)

    def pause(self, listed):
        self.paused |= {Partition(item.topic, item.partition) for item in listed}

    def resume(self, listed):
        self.paused -= {Partition(item.topic, item.partition) for item in listed}

    def seek(self, item):
        self.stands[Partition(item.topic, item.partition)] = item.offset

    def offsets_for_times(self, *_, **__):
        return []

    def poll(self, _):
        taken = self.consume(1, 0)
        return taken[0] if taken else None

    def consume(self, count, _):
        found = []
        for where in sorted(self.stands):
            if where in self.paused:
                continue
            while len(found) < count and self.stands[where] < len(self.logs[where]):
                found.append(Message(where, self.stands[where], self.logs[where][self.stands[where]]))
                self.stands[where] += 1
        return found

    def close(self):
        self.stands.clear()


class Ids(Registry):
    """A registry that knows some ids; the others it is asked for in vain."""

    def __init__(self, *known):
        super().__init__(RegistrySettings(url="http://127.0.0.1:1"), client=object())
        self.known = set(known)

    def ready(self, schema_id, appended_ms):
        return schema_id in self.known


def framed(number: int) -> bytes:
    return b"\x00" + number.to_bytes(4, "big") + b"body"


def logs():
    return {HERE: [framed(1), framed(9), framed(1), None, b""], THERE: [framed(1)] * 3}


def offsets(records, where):
    return [record.offset for record in records if record.source == where]


def fetching(ids):
    broker = Broker(logs())
    made = Fetching(broker, incremental=True, gate=Gate(ids))
    made.assign([HERE, THERE])
    for where in (HERE, THERE):
        made.start(where, 0)
    return broker, made


def polled(reader, most=10, times=3):
    return [record for _ in range(times) for record in reader.poll(most, 0.0)]


def test_a_member_holds_the_partition_alone_and_goes_on_with_the_very_record():
    ids = Ids(1)
    broker, made = fetching(ids)
    records = polled(made)
    assert offsets(records, HERE) == [0]
    assert offsets(records, THERE) == [0, 1, 2]
    assert broker.paused == {HERE}
    assert made.position(HERE) == 1
    ids.known.add(9)
    records = polled(made)
    assert offsets(records, HERE) == [1, 2, 3, 4]
    assert not broker.paused


def test_what_the_owner_pauses_stays_paused_when_the_schema_is_known():
    ids = Ids(1)
    broker, made = fetching(ids)
    polled(made)
    made.pause(HERE)
    ids.known.add(9)
    assert polled(made) == []
    assert broker.paused == {HERE}
    made.resume(HERE)
    assert offsets(polled(made), HERE) == [1, 2, 3, 4]


def test_what_the_owner_resumes_stands_still_while_the_schema_is_not_known():
    ids = Ids(1)
    _, made = fetching(ids)
    polled(made)
    made.pause(HERE)
    made.resume(HERE)
    assert polled(made) == []
    assert made.position(HERE) == 1
    ids.known.add(9)
    assert offsets(polled(made), HERE) == [1, 2, 3, 4]


def test_a_partition_that_is_moved_or_taken_is_held_no_more():
    ids = Ids(1)
    _, made = fetching(ids)
    polled(made)
    made.start(HERE, 2)
    assert offsets(polled(made), HERE) == [2, 3, 4]
    made.start(HERE, 1)
    assert polled(made) == []
    made.unassign([HERE])
    made.assign([HERE])
    made.start(HERE, 3)
    assert offsets(polled(made), HERE) == [3, 4]


def reader(ids):
    made = AssignedReader(SETTINGS, {HERE: 0, THERE: 0}, lookup=object())
    broker = Broker(logs())
    made._gate, made._consumer, made._client = Gate(ids), broker, lambda: broker
    broker.stands = {HERE: 0, THERE: 0}
    return broker, made


def read(made):
    return [record for _ in range(3) for record in made.poll_batch(10, 0.0)]


def test_a_reader_by_hand_does_the_same_and_says_what_it_waits_for():
    ids = Ids(1)
    broker, made = reader(ids)
    records = read(made)
    assert (offsets(records, HERE), offsets(records, THERE)) == ([0], [0, 1, 2])
    assert made.positions == {HERE: 1, THERE: 3}
    assert "t[0]: offset 1 waits for schema id 9 of the registry at http://127.0.0.1:1" in (made.waiting or "")
    ids.known.add(9)
    assert offsets(read(made), HERE) == [1, 2, 3, 4]
    assert made.waiting is None
    assert not broker.paused, "a pause outlives another assignment of the partition"


def test_a_reader_that_is_moved_past_the_record_goes_on():
    ids = Ids(1)
    _, made = reader(ids)
    read(made)
    made.add(HERE, 2)
    assert made.waiting is None
    assert offsets(read(made), HERE) == [2, 3, 4]
    made.add(HERE, 1)
    assert read(made) == []
    made.remove(HERE)
    assert made.waiting is None
