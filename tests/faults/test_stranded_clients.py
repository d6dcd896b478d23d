"""A broker that was frozen past its session with the controller and is fenced when it thaws: nobody stays silent.

Asked in that moment, a single node lists no broker. librdkafka believes it, and some clients would never come back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.faults.forgetful_proxy import ForgetfulProxy, forgetful_kafka
from undercurrent.errors import (
    RetriableTransactionError,
    StrandedError,
    TransactionError,
    UnreachableError,
)
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.aftermath import Aftermath, Logs
from undercurrent.kafka.bulk import BulkPublisher, Outgoing
from undercurrent.kafka.client import Assignor, Isolation, group_consumer_config, make_consumer
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Delivery, Publisher
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.kafka.subscriber import GroupSubscriber
from undercurrent.kafka.transactions import TransactionalWriter, until_decided
from undercurrent.testing.brokers import QUICK
from undercurrent.testing.pytest_plugin import or_skip
from undercurrent.topics import HOUR_MS, Topic

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(180)]

FREEZE_S = 8.0
BACK_S = 30.0

FLOW, BULK, CONTROL, TRANSACTIONS = range(4)


class Clients:
    """Threads that each use one client, and when each of them last succeeded."""

    def __init__(self) -> None:
        self.worked_at: dict[str, float] = {}
        self.failed: dict[str, BaseException] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def run(self, name: str, open_client: Callable[[], Iterator[Callable[[], object]]]) -> None:
        """Use a client over and over.

        Args:
            name: of the thread.
            open_client: yields what uses the client once and returns whether that worked; goes on to close it.
        """
        self.worked_at[name] = 0.0
        thread = threading.Thread(target=self._use, args=(name, contextmanager(open_client)), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def silent(self, for_s: float) -> list[str]:
        """Return who has not succeeded for so long."""
        assert self.failed == {}
        return sorted(name for name, at in self.worked_at.items() if time.monotonic() - at > for_s)

    def stop(self) -> None:
        """End them all."""
        self._stop.set()
        for thread in self._threads:
            thread.join(20.0)
        assert [thread.name for thread in self._threads if thread.is_alive()] == []
        assert self.failed == {}

    def _use(self, name: str, open_client: Callable[[], object]) -> None:
        try:
            with open_client() as use:
                while not self._stop.is_set():
                    if use():
                        self.worked_at[name] = time.monotonic()
        except BaseException as exc:  # the test's thread raises it
            self.failed[name] = exc


class Scene:
    """One client of each kind on a topic of four partitions, and what each of them saw."""

    def __init__(self, proxy: ForgetfulProxy, topic: str) -> None:
        self.settings = proxy.settings()
        # Under the broker-side protocol the session is the broker's.
        self.classic_settings = proxy.settings(**QUICK)
        TopicAdmin(self.settings).create([Topic(name=topic, partitions=4, retention_ms=HOUR_MS)])
        self.topic = topic
        self.read: dict[str, list[int]] = {}
        self.commits: dict[str, int] = {}  # handed over and not answered
        self.delivered: dict[int, list[Delivery]] = {FLOW: [], CONTROL: []}
        self.produced = {FLOW: 0, CONTROL: 0}
        self.bulk_records = 0
        self.committed: list[bytes] = []

    def reader(self) -> Iterator[Callable[[], object]]:
        seen = self.read["reader"] = []
        with AssignedReader(self.settings, {(self.topic, FLOW): 0}) as reader:

            def use() -> bool:
                records = reader.poll_batch(500, 0.1)
                seen.extend(record.offset for record in records)
                return bool(records)

            yield use

    def member(self, name: str, assignor: Assignor) -> Iterator[Callable[[], object]]:
        seen = self.read[name] = []
        self.commits[name] = 0

        class Owner:
            def on_assigned(self, partitions: list[Partition]) -> None:
                for where in partitions:
                    member.start(where, len(seen) if where.number == FLOW else 1 << 40)

            def on_revoked(self, partitions: list[Partition]) -> None: ...
            def on_lost(self, partitions: list[Partition]) -> None: ...

        settings = self.settings if assignor is Assignor.CONSUMER else self.classic_settings
        member = GroupSubscriber(settings, f"{self.topic}.{name}", [self.topic], Owner(), assignor=assignor)

        def use() -> bool:
            records = [record for record in member.poll_batch(500, 0.1) if record.partition == FLOW]
            seen.extend(record.offset for record in records)
            if member.commit({(self.topic, FLOW): (len(seen), None)} if records else {}):
                self.commits[name] += 1
            self.commits[name] -= len(member.take_commit_results())
            member.take_events()
            return bool(records)

        with member:
            yield use
        self.commits[name] -= len(member.take_commit_results())

    def publisher(self, number: int, publisher: Publisher) -> Iterator[Callable[[], object]]:
        delivered = self.delivered[number]

        def use() -> bool:
            known, value = len(delivered), b"%d" % self.produced[number]
            assert publisher.produce(self.topic, value, partition=number, on_delivery=delivered.append) is None
            self.produced[number] += 1
            publisher.poll(0.02)
            return any(delivery.error is None for delivery in delivered[known:])

        yield use
        publisher.flush(30.0)
        publisher.close()

    def bulk(self) -> Iterator[Callable[[], object]]:
        bulk = BulkPublisher(self.settings)

        def use() -> bool:
            records = [Outgoing(None, b"%d" % (self.bulk_records + at)) for at in range(5)]
            assert bulk.write({Partition(self.topic, BULK): records}) == []
            self.bulk_records += len(records)
            time.sleep(0.05)
            return True

        yield use
        bulk.close()

    def writer(self) -> Iterator[Callable[[], object]]:
        made: list[TransactionalWriter] = []
        count = [0]

        def until(call: Callable[[], None]) -> None:
            while True:
                try:
                    return call()
                except RetriableTransactionError:
                    continue

        def use() -> bool:
            if not made:
                made.append(TransactionalWriter(self.settings, f"{self.topic}.slot", call_timeout_s=5.0))
                made[0].init(60.0)
            writer, value = made[0], b"%d" % count[0]
            count[0] += 1
            try:
                writer.begin()
                writer.produce(self.topic, value, partition=TRANSACTIONS)
                until(writer.commit)
            except TransactionError as exc:
                try:
                    if isinstance(exc, StrandedError):
                        raise
                    until(writer.abort)
                except StrandedError:
                    made.pop().close()
                return False
            self.committed.append(value)
            return True

        yield use
        made[0].close()

    def lookup(self) -> Iterator[Callable[[], object]]:
        lookup, admin = OffsetLookup(self.settings, timeout_s=2.0), TopicAdmin(self.settings, timeout_s=2.0)

        def use() -> bool:
            time.sleep(0.1)
            try:
                return lookup.end([(self.topic, FLOW)])[Partition(self.topic, FLOW)] >= 0 and bool(
                    admin.describe([self.topic], with_config=False)
                )
            except UnreachableError:
                return False

        yield use

    def check(self) -> None:
        """Nothing was read twice or jumped over, and nothing that was written was lost or doubled."""
        for name, offsets in self.read.items():
            assert offsets == list(range(len(offsets))), name
        assert set(self.commits.values()) == {0}, self.commits
        assert [delivery.error for delivery in self.delivered[FLOW]] == [None] * self.produced[FLOW]
        # Records that live for two seconds fail, and each is told of once.
        assert len(self.delivered[CONTROL]) == self.produced[CONTROL]
        starts = {(self.topic, number): 0 for number in range(4)}
        with AssignedReader(self.settings, starts, isolation=Isolation.READ_COMMITTED) as reader:
            records = list(reader.read_to_end(30.0))
        values = {number: [r.value for r in records if r.partition == number] for number in range(4)}
        assert values[FLOW] == [b"%d" % at for at in range(self.produced[FLOW])]
        assert values[BULK] == [b"%d" % at for at in range(self.bulk_records)]
        assert sorted(set(values[TRANSACTIONS])) == sorted(values[TRANSACTIONS])
        assert set(self.committed) <= set(values[TRANSACTIONS])


def wait(condition: Callable[[], bool], what: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def proxy() -> Iterator[ForgetfulProxy]:
    yield from or_skip(forgetful_kafka())


def test_a_writer_that_is_not_told_of_its_group_gives_way_to_another(proxy: ForgetfulProxy, topic_prefix: str) -> None:
    """As after a broker's death: by itself librdkafka would wait for the group's coordinator for good."""
    settings, topic = proxy.settings(), topic_prefix
    TopicAdmin(settings).create([Topic(name=topic, partitions=1, retention_ms=HOUR_MS)])

    def write(value: bytes) -> None:
        writer = TransactionalWriter(settings, f"{topic}.slot", call_timeout_s=2.0)
        writer.init(60.0)
        writer.begin()
        writer.produce(topic, value, partition=0)
        try:
            # As somebody who is no member: the group's members look for its coordinator too.
            writer.send_offsets({(topic, 0): (int(value), None)}, nobody.consumer_group_metadata())
            writer.commit()
        finally:
            writer.close()

    nobody = make_consumer(group_consumer_config(settings, f"{topic}.group"))
    with proxy.without_groups(), pytest.raises(StrandedError, match="has not ended after 4 s"):
        write(b"1")
    assert proxy.refused
    write(b"2")
    assert OffsetLookup(settings).committed(f"{topic}.group", [(topic, 0)]) == {Partition(topic, 0): (2, None)}
    with AssignedReader(settings, {(topic, 0): 0}, isolation=Isolation.READ_COMMITTED) as reader:
        assert [record.value for record in reader.read_to_end(30.0)] == [b"2"]
    nobody.close()


def test_a_transaction_that_its_coordinator_forgot_is_ended_by_the_next_writer(
    proxy: ForgetfulProxy, topic_prefix: str
) -> None:
    """As where a killed broker comes back and leaves logs out: they wait for an end that nobody tells them."""
    settings, topic, group = proxy.settings(), topic_prefix, f"{topic_prefix}.group"
    wanted = [Topic(name=name, partitions=2, retention_ms=HOUR_MS) for name in (topic, f"{topic}.beside")]
    TopicAdmin(settings).create(wanted)
    lookup, nobody = OffsetLookup(settings, timeout_s=2.0), make_consumer(group_consumer_config(settings, group))
    verdicts = [(topic, 0), (topic, 1)]

    def write(offset: int) -> None:
        writer.begin()
        for number in (0, 1):
            writer.produce(topic, b"%d" % offset, partition=number)
        until_decided(lambda: writer.send_offsets({(topic, 0): (offset, None)}, nobody.consumer_group_metadata()), 60.0)
        until_decided(writer.commit, 60.0)

    def stable() -> bool:
        return lookup.end(verdicts) == lookup.end(verdicts, isolation=Isolation.READ_COMMITTED)

    writer, aftermath = TransactionalWriter(settings, f"{topic}.slot"), Aftermath(due=True)
    writer.init(60.0)
    write(1)
    # All logs have been told of it: one that comes late would end the next one too.
    assert lookup.committed(group, [(topic, 0)]) == {Partition(topic, 0): (1, None)}
    wait(stable, lambda: "open", 60.0)
    with proxy.without_transactions():
        write(2)  # the coordinator takes it for a question about the first one, and says that it is committed
    writer.close(0.0)
    # Nobody ends it, whatever time passes.
    writer = TransactionalWriter(settings, f"{topic}.slot")
    writer.init(60.0)
    assert not stable()
    with pytest.raises(UnreachableError, match="offsets of group"):
        lookup.committed(group, [(topic, 0)])
    logs = Logs(partitions=verdicts, key=b"", value=b"", beside=(f"{topic}.beside", 0))
    aftermath.settle(writer, logs, nobody.consumer_group_metadata(), lambda call: until_decided(call, 60.0))
    wait(stable, lambda: "open", 60.0)
    assert OffsetLookup(settings).committed(group, [(topic, 0)]) == {Partition(topic, 0): (1, None)}
    write(3)
    assert OffsetLookup(settings).committed(group, [(topic, 0)]) == {Partition(topic, 0): (3, None)}
    with AssignedReader(settings, dict.fromkeys(verdicts, 0), isolation=Isolation.READ_COMMITTED) as reader:
        assert sorted(record.value for record in reader.read_to_end(30.0)) == [b"1", b"1", b"3", b"3"]
    writer.close()
    nobody.close()


def test_every_kind_of_client_works_again(
    proxy: ForgetfulProxy, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    scene, clients = Scene(proxy, topic_prefix), Clients()
    clients.run("publisher", lambda: scene.publisher(FLOW, Publisher(scene.settings)))
    clients.run("control", lambda: scene.publisher(CONTROL, Publisher.control(scene.settings, message_timeout_s=2.0)))
    clients.run("bulk", scene.bulk)
    clients.run("writer", scene.writer)
    clients.run("lookup", scene.lookup)
    clients.run("reader", scene.reader)
    for assignor in Assignor:
        clients.run(str(assignor), lambda assignor=assignor: scene.member(str(assignor), assignor))
        # A member of a classic group is stranded nine times in ten: that none of four is will not be seen.
        clients.run(f"{assignor}-2", lambda assignor=assignor: scene.member(f"{assignor}-2", assignor))
    wait(lambda: clients.silent(1.5) == [], lambda: clients.silent(1.5), 90.0)
    proxy.freeze(FREEZE_S)
    thawed_at = worked_since = time.monotonic()
    # For a while: a client may work on for a moment before it learns of no broker.
    while time.monotonic() - worked_since < 5.0:
        time.sleep(0.1)
        if silent := clients.silent(1.5):
            worked_since = time.monotonic()
            assert worked_since - thawed_at < BACK_S, silent
    said = [record.message for record in caplog.records if "lost its brokers for good" in record.message]
    assert [message for message in said if message.startswith("the writer")]
    assert [message for message in said if message.startswith("the member of group")]
    clients.stop()
    scene.check()
