"""The loop of a point over clients that are told what to do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Executor, Future
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry

import probe_consumers.point_host as point_host
from probe_consumers.aborts import AbortWriter
from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.metrics import HostMetrics, ProbeMetrics
from probe_consumers.observer import Observer, Watched
from probe_consumers.point_host import LoopSettings, PointHost
from probe_consumers.runner import BindingRunner
from probe_consumers.transactor import Transactor
from undercurrent.codec import Codec
from undercurrent.errors import (
    AbortableTransactionError,
    FencedError,
    RetriableTransactionError,
    StrandedError,
    TopicError,
    UnreachableError,
)
from undercurrent.kafka.events import PartitionEvent, PartitionProblem
from undercurrent.kafka.publisher import Delivery, DeliveryError
from undercurrent.kafka.records import Partition, Record
from undercurrent.probes import Binding, LinearProbe, LoadedProbe
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_position import HostMetadata
from undercurrent.protocol.messages import ProbeHeartbeat, VerdictKind
from undercurrent.testing.streams import StreamBuilder

TOPIC = "undercurrent.activations.residual"
CODEC = Codec()


class Cluster:
    """One partition, a group's offsets, and what transactions wrote; some calls fail when told to."""

    def __init__(self):
        self.log, self.start = [], 0
        self.committed, self.unknown_for = None, 0
        self.written, self.commands = [], []
        self.fail = []  # exceptions, raised by the next commits of a transaction
        self.abort_error = None
        self.calls = []

    def append(self, *values):
        for value in values:
            offset = self.start + len(self.log)
            self.log.append(Record(TOPIC, 0, offset, b"k", value, int(time.time() * 1000), ()))

    @property
    def end(self):
        return self.start + len(self.log)

    def verdicts(self, *kinds):
        found = [CODEC.decode(value) for topic, value in self.written if topic == "verdicts"]
        return [item for item in found if not kinds or item.kind in kinds]


class Subscriber:
    def __init__(self, cluster, handler):
        self.cluster, self.handler = cluster, handler
        self.position, self.paused, self.assigned, self.events = None, False, False, []
        self.freeze_s = 0.0

    def open(self):
        pass

    def close(self):
        self.handler.on_revoked([Partition(TOPIC, 0)])

    def poll_batch(self, most, timeout_s):
        if not self.assigned:
            self.assigned = True
            self.handler.on_assigned([Partition(TOPIC, 0)])
        if self.position is None or self.paused:
            return []
        first = self.position - self.cluster.start
        batch = self.cluster.log[first : first + most] if first >= 0 else []
        self.position += len(batch)
        return batch

    def take_events(self):
        events, self.events = self.events, []
        return events

    def consumer_group_metadata(self):
        return "generation"

    def committed(self, partitions, timeout_s):
        if self.cluster.unknown_for:
            self.cluster.unknown_for -= 1
            return {}
        return {where: self.cluster.committed or (None, None) for where in partitions}

    def start(self, partition, offset):
        self.position = offset
        return True

    def pause(self, partition):
        self.paused = True
        return True

    def resume(self, partition):
        self.paused = False
        return True


class Writer:
    transactional_id = "t"

    def __init__(self, cluster):
        self.cluster, self.records, self.offsets = cluster, [], None
        cluster.calls.append("writer")

    def init(self, timeout_s):
        pass

    def begin(self):
        self.records, self.offsets = [], None

    def produce(self, topic, value, **fields):
        self.records.append((topic, value))

    def send_offsets(self, offsets, group_metadata):
        assert group_metadata == "generation"
        self.offsets = offsets

    def commit(self):
        if self.cluster.fail:
            raise self.cluster.fail.pop(0)
        self.cluster.written += self.records
        if self.offsets:
            self.cluster.committed = self.offsets[TOPIC, 0]
        self.cluster.calls.append("commit")

    def abort(self):
        self.cluster.calls.append("abort")

    def close(self):
        self.cluster.calls.append("close")


class Publisher:
    def __init__(self, cluster):
        self.cluster, self.waiting = cluster, []

    def open(self):
        pass

    def produce(self, topic, value, *, key, partition=-1, on_delivery=None):
        self.waiting.append((topic, value, on_delivery))

    def poll(self, timeout_s):
        return 0

    def flush(self, timeout_s):
        self.cluster.calls.append("flush")
        for topic, value, on_delivery in self.waiting:
            error, self.cluster.abort_error = self.cluster.abort_error, None
            if error is None:
                self.cluster.commands.append(CODEC.decode(value))
            if on_delivery:
                on_delivery(Delivery(topic, 0, 0, 0.0, error))
        self.waiting = []
        return 0

    def close(self, timeout_s=1.0):
        return 0


class Lookup:
    def __init__(self, cluster):
        self.cluster, self.down = cluster, 0

    def beginning(self, partitions):
        if self.down:
            self.down -= 1
            raise UnreachableError("nobody there")
        return dict.fromkeys(map(lambda where: Partition(*where), partitions), self.cluster.start)

    def end(self, partitions):
        return dict.fromkeys(map(lambda where: Partition(*where), partitions), self.cluster.end)

    def partitions(self, topic):
        return [Partition(topic, 0)]


class AtOnce(Executor):
    """Runs a transaction where it is handed over."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:
            future.set_exception(exc)
        return future


class Later(AtOnce):
    """Keeps transactions, once it is told to, until it is told to run them."""

    def __init__(self):
        self.kept = []
        self.keeps = False

    def submit(self, fn, /, *args, **kwargs):
        if not self.keeps:
            return super().submit(fn, *args, **kwargs)
        future = Future()
        self.kept.append((future, fn, args))
        return future

    def run(self):
        self.keeps = False
        for future, fn, args in self.kept:
            future.set_result(fn(*args))
        self.kept.clear()


@contextmanager
def make_host(cluster, *, stable=False, threshold=1.0, executor=None):
    probe = LinearProbe.from_arrays([1, 0, 0, 0], 0.0, layer=0, tensor_type="residual_stream", threshold=threshold)
    loaded = LoadedProbe(
        factory=LinearProbe.factory(artefact=probe.artefact), sample=probe, fingerprint=probe.fingerprint
    )
    bounds = [Bound(Binding(name="guard", point="residual", probe="p", mode="abort"), loaded)]
    runner = BindingRunner(bounds, "group", lambda: time.time_ns() // 1000)
    registry = CollectorRegistry()
    made = {}

    def make_subscriber(handler):
        made["subscriber"] = Subscriber(cluster, handler)
        return made["subscriber"]

    lookup = Lookup(cluster)
    host = PointHost(
        core=ProbeHost("residual", set_fingerprint(bounds), runner, 60_000_000),
        runner=runner,
        make_subscriber=make_subscriber,
        transactor=Transactor(
            lambda: Writer(cluster),
            TOPIC,
            "verdicts",
            "dlq",
            CODEC,
            letter_bytes=100_000,
            stable=stable,
            deadline_s=0.2,
        ),
        aborts=AbortWriter(Publisher(cluster), "control", CODEC),
        lookup=lookup,
        codec=CODEC,
        clock=lambda: time.time_ns() // 1000,
        metrics=HostMetrics(ProbeMetrics(registry), "residual"),
        settings=LoopSettings(
            topic=TOPIC,
            verdicts="verdicts",
            service="probes",
            fingerprint=set_fingerprint(bounds),
            start_from="earliest",
        ),
        executor=executor or AtOnce(),
    )
    host.subscriber, host.lookup, host.registry, host.bounds = made["subscriber"], lookup, registry, bounds
    yield host


def turn_until(host, condition, most=200):
    for _ in range(most):
        host.turn()
        if condition():
            return
        host._next_transaction_s = host._next_question_s = 0.0
    raise AssertionError("it did not come true")


def whole_stream(name="r", first=0.0):
    stream = StreamBuilder(name)
    return [stream.start(), stream.block([0], [first, 0, 0, 0]), stream.end()]


def test_a_new_group_commits_where_it_begins_before_it_reads():
    cluster = Cluster()
    cluster.append(*whole_stream())
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.committed is not None)
        assert cluster.committed[0] == 0
        assert HostMetadata.from_text(cluster.committed[1]).emitted_up_to == 0
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
        assert cluster.committed[0] == 3


def test_nothing_flows_until_the_committed_offset_is_known():
    cluster = Cluster()
    cluster.append(*whole_stream())
    cluster.unknown_for = 3
    with make_host(cluster) as host:
        host.turn()
        assert (host.waiting, host.subscriber.paused or host.subscriber.position is None) == ([0], True)
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
        assert host.waiting == []


def test_an_abort_is_delivered_before_the_transaction_that_covers_it():
    cluster = Cluster()
    cluster.append(*whole_stream(first=2.0))
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
    [command] = cluster.commands
    [signal] = cluster.verdicts(VerdictKind.SIGNAL)
    assert signal.command_id == command.command_id
    last = len(cluster.calls) - 1 - cluster.calls[::-1].index("commit")
    assert "flush" in cluster.calls[:last]


def test_an_abort_does_not_wait_for_the_transaction_under_way():
    cluster, slow = Cluster(), Later()
    with make_host(cluster, executor=slow) as host:
        turn_until(host, lambda: cluster.committed is not None)
        slow.keeps = True
        cluster.append(*whole_stream("a", first=2.0))
        turn_until(host, lambda: slow.kept)
        cluster.append(*whole_stream("b", first=2.0))
        turn_until(host, lambda: len(host._aborts._publisher.waiting) == 2)
        assert len(slow.kept) == 1
        assert not cluster.verdicts(VerdictKind.RESULT)
        slow.run()
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) == 2)
    assert [v.request_id for v in cluster.verdicts(VerdictKind.SIGNAL)] == ["a", "b"]


def test_an_abort_that_does_not_arrive_holds_its_transaction_back_and_is_sent_again():
    cluster = Cluster()
    cluster.append(*whole_stream(first=2.0))
    cluster.abort_error = DeliveryError("_MSG_TIMED_OUT", "too late", fatal=False)
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
    assert len(cluster.commands) == 1
    assert len(cluster.verdicts(VerdictKind.SIGNAL)) == len(cluster.verdicts(VerdictKind.RESULT)) == 1


@pytest.mark.parametrize(
    "errors",
    [
        [AbortableTransactionError("the group moved on")],
        [RetriableTransactionError("not yet")] * 3,
        [FencedError("beyond use")],
        [StrandedError("no broker")],
        [AbortableTransactionError("a"), FencedError("b"), AbortableTransactionError("c")],
    ],
)
def test_a_transaction_that_fails_is_derived_again_from_the_log(errors):
    cluster = Cluster()
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream("a", 2.0), *whole_stream("b"))
        cluster.fail = list(errors)
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) >= 2)
        assert cluster.fail == []
    assert [item.request_id for item in cluster.verdicts(VerdictKind.RESULT)] == ["a", "b"]
    assert len(cluster.verdicts(VerdictKind.WATERMARK)) == 2
    assert len({command.command_id for command in cluster.commands}) == 1


def test_whoever_is_fenced_off_its_slot_ends():
    cluster = Cluster()
    with make_host(cluster, stable=True) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream())
        cluster.fail = [FencedError("another has the slot")]
        with pytest.raises(FencedError):
            turn_until(host, lambda: False)


@pytest.mark.parametrize("stable", [False, True])
def test_a_writer_that_lost_its_brokers_is_replaced_and_not_asked_to_abort(stable):
    cluster = Cluster()
    with make_host(cluster, stable=stable) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream())
        before = len(cluster.calls)
        cluster.fail = [StrandedError("no broker")]
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
        assert [call for call in cluster.calls[before:] if call in ("writer", "abort")] == ["writer"]


def test_a_loop_that_was_frozen_polls_before_it_commits(monkeypatch):
    cluster = Cluster()
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream())
        before = list(cluster.calls)
        # Every poll takes longer than a pause may: the generation that it ends with may be news to this thread.
        monkeypatch.setattr(point_host, "PAUSE_S", -1.0)
        for _ in range(5):
            host._next_transaction_s = 0.0
            host.turn()
        assert cluster.calls == before
        monkeypatch.undo()
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))


def test_a_revoked_partition_leaves_nothing_behind():
    cluster = Cluster()
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream())
        host._next_transaction_s = time.monotonic() + 60
        host.turn()
        host.on_revoked([Partition(TOPIC, 0)])
        host._next_transaction_s = 0.0
        host.turn()
        assert cluster.verdicts() == []
        assert (host.emitted_up_to, host.runner.open_streams) == ({}, 0)


def test_a_log_that_retention_cut_off_is_one_declared_gap():
    cluster = Cluster()
    with make_host(cluster) as host:
        stream = StreamBuilder("cut")
        cluster.append(stream.start())
        turn_until(
            host, lambda: cluster.committed is not None and cluster.committed[0] == 0 and host.emitted_up_to == {0: 1}
        )
        cluster.log, cluster.start = [], 50
        cluster.append(*whole_stream("next"))
        host.subscriber.events.append(
            PartitionEvent(Partition(TOPIC, 0), PartitionProblem.OUT_OF_RANGE, "OFFSET_OUT_OF_RANGE", "gone", 1)
        )
        host.lookup.down = 2
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) >= 2)
    ends = {item.request_id: (item.end_reason, item.complete) for item in cluster.verdicts(VerdictKind.RESULT)}
    assert ends == {"cut": ("lost", False), "next": ("finished", True)}
    assert len([topic for topic, _ in cluster.written if topic == "dlq"]) == 1


def watch(host):
    return Watched(host, "residual", "group", host.bounds, host._metrics)


def sample(host, name):
    return host.registry.get_sample_value(f"undercurrent_{name}", {"point": "residual", "partition": "0"})


def test_true_lag_reaches_zero_although_a_stream_holds_the_committed_offset():
    cluster = Cluster()
    with make_host(cluster) as host:
        stream = StreamBuilder("r")
        cluster.append(stream.start(), stream.block([0], [0] * 4))
        turn_until(host, lambda: cluster.verdicts())
        assert cluster.committed[0] == 0
        watched = watch(host)
        watched.see({0: cluster.end}, time.monotonic())
        assert (watched.lag_records, watched.lag_s, sample(host, "probe_lag_records")) == (0, 0.0, 0.0)
        watched.see({0: cluster.end + 7}, time.monotonic() + 2.0)
        assert (watched.lag_records, sample(host, "probe_lag_records")) == (7, 7.0)
        assert 0.0 < watched.lag_s < 60.0
        host.on_lost([Partition(TOPIC, 0)])
        host.turn()
        watched.see({}, time.monotonic())
        assert sample(host, "probe_lag_records") is None


def test_heartbeats_tell_who_guards_what_and_stop_when_the_loop_does(monkeypatch):
    cluster = Cluster()
    publisher = Publisher(cluster)
    with make_host(cluster) as host:
        watched = watch(host)
        observer = Observer([watched], host.lookup, publisher, "verdicts", CODEC, lambda: 11)
        assert observer.unready() == ["point residual: no partitions assigned yet"]
        turn_until(host, lambda: host.emitted_up_to == {0: 0})
        observer.look(watched)
        beat = CODEC.decode(publisher.waiting[-1][1])
        assert isinstance(beat, ProbeHeartbeat)
        assert (beat.service, beat.partitions, beat.partition_count, beat.sent_at_us) == ("group", (0,), 1, 11)
        assert [(item.probe, item.mode) for item in beat.probes] == [("guard", "abort")]
        assert observer.unready() == []
        monkeypatch.setattr(type(host.heartbeat), "age_s", 9.0)
        observer.look(watched)
        assert len(publisher.waiting) == 1
        assert observer.unready() == ["point residual: the loop has stood still for 9 s"]


def test_a_topic_that_is_gone_makes_the_host_unready_until_it_is_back():
    class Gone:
        def partitions(self, topic):
            raise TopicError(f"there is no topic {topic!r}")

    cluster, stop = Cluster(), threading.Event()
    with make_host(cluster) as host:
        watched, publisher = watch(host), Publisher(cluster)
        turn_until(host, lambda: host.emitted_up_to == {0: 0})
        stop.set()
        Observer([watched], Gone(), publisher, "verdicts", CODEC, lambda: 11).run(stop)
        assert watched.unready() == [f"point residual: there is no topic {TOPIC!r}"]
        Observer([watched], host.lookup, publisher, "verdicts", CODEC, lambda: 11).run(stop)
        assert watched.unready() == []


def test_a_refused_stream_makes_the_host_unready_and_says_why():
    cluster = Cluster()
    with make_host(cluster) as host:
        cluster.append(StreamBuilder("r", width=9).start())
        turn_until(host, lambda: cluster.verdicts(VerdictKind.ERROR))
        [reason] = watch(host).unready()
        assert "probe guard refuses the latest stream" in reason
        assert "width" in reason
