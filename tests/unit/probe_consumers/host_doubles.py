"""Clients of a point host that are told what to do, and a host on them."""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace

from prometheus_client import CollectorRegistry

from probe_consumers.aborts import AbortWriter
from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.drift import DriftSeer, DriftWatch
from probe_consumers.inputs import Inputs
from probe_consumers.metrics import HostMetrics, ProbeMetrics
from probe_consumers.point_host import LoopSettings, PointHost
from probe_consumers.runner import BindingRunner
from probe_consumers.states import StatesTopic
from probe_consumers.transactor import Transactor
from undercurrent.codec import Codec
from undercurrent.errors import (
    UnreachableError,
)
from undercurrent.kafka.publisher import Delivery
from undercurrent.kafka.records import Partition, Record
from undercurrent.probes import Binding, LinearProbe, LoadedProbe
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.messages import ProbeHeartbeat, ProbeVerdict
from undercurrent.testing.streams import StreamBuilder

TOPIC = "undercurrent.activations.residual"
BESIDE = ("rollouts", 0)
INPUTS = Inputs(["residual"], [TOPIC], ["dlq"])
CODEC = Codec()
HELLO = ProbeHeartbeat(service="probes", member="", probes=(), partitions=(), sent_at_us=0)


class Cluster:
    """One partition, a group's offsets, and what transactions wrote; some calls fail when told to."""

    def __init__(self):
        self.log, self.start = [], 0
        self.committed, self.unknown_for = None, 0
        self.written, self.commands = [], []
        self.fail = []  # exceptions, raised by the next commits of a transaction; None for one that succeeds
        self.abort_error = None
        self.calls = []
        self.history = []  # what was committed, in order
        self.states = {}
        self.forgotten = False  # what is committed is not known before a transaction of the next writer has ended

    def append(self, *values):
        for value in values:
            offset = self.start + len(self.log)
            self.log.append(Record(TOPIC, 0, offset, b"k", value, int(time.time() * 1000), ()))

    @property
    def end(self):
        return self.start + len(self.log)

    def verdicts(self, *kinds):
        found = [CODEC.decode(value) for topic, value in self.written if topic == "verdicts"]
        return [item for item in found if isinstance(item, ProbeVerdict) and (not kinds or item.kind in kinds)]


class Subscriber:
    def __init__(self, cluster, handler):
        self.cluster, self.handler = cluster, handler
        self.position, self.paused, self.assigned, self.events = None, False, False, []
        self.pauses = 0

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
        if self.cluster.forgotten:
            return {}
        if self.cluster.unknown_for:
            self.cluster.unknown_for -= 1
            return {}
        return {where: self.cluster.committed or (None, None) for where in partitions}

    def start(self, partition, offset):
        self.position = offset
        return True

    def pause(self, partition):
        self.paused = True
        self.pauses += 1
        return True

    def resume(self, partition):
        self.paused = False
        return True


class Writer:
    transactional_id = "t"

    def __init__(self, cluster):
        self.cluster, self.records, self.states, self.offsets = cluster, [], {}, None
        cluster.calls.append("writer")

    def init(self, timeout_s):
        pass

    def begin(self):
        self.records, self.states, self.offsets = [], {}, None

    def produce(self, topic, value, **fields):
        if topic == "states":
            self.states[fields["key"]] = value
        self.records.append((topic, value))

    def send_offsets(self, offsets, group_metadata):
        assert group_metadata == "generation"
        self.offsets = offsets

    def commit(self):
        if self.cluster.fail and (error := self.cluster.fail.pop(0)) is not None:
            raise error
        self.cluster.written += self.records
        self.cluster.states |= self.states
        if self.offsets:
            self.cluster.committed = self.offsets[TOPIC, 0]
            self.cluster.history.append(self.cluster.committed)
        self.cluster.calls.append("commit")

    def flush(self):
        pass

    def abort(self):
        if self.offsets == {BESIDE: (0, None)}:
            assert [topic for topic, _ in self.records] == ["verdicts", "verdicts", *INPUTS.letters, "states"]
            self.cluster.forgotten = False
        self.cluster.calls.append("abort")

    def close(self, timeout_s=5.0):
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
                on_delivery(Delivery(topic, 0, 0, error))
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
def make_host(
    cluster,
    *,
    stable=False,
    threshold=1.0,
    executor=None,
    knows=None,
    reference=None,
    window_requests=10,
    change=False,
    keeping=None,
    probe_class=LinearProbe,
):
    probe = probe_class.from_arrays([1, 0, 0, 0], 0.0, layer=0, tensor_type="residual_stream", threshold=threshold)
    probe = probe_class(replace(probe.artefact, reference=reference or {}))
    loaded = LoadedProbe(
        factory=probe_class.factory(artefact=probe.artefact), sample=probe, fingerprint=probe.fingerprint
    )
    bounds = [Bound(Binding(name="guard", point="residual", probe="p", mode="abort"), loaded)]
    runner = BindingRunner(bounds, "group", lambda: time.time_ns() // 1000, drift=DriftSeer())
    registry = CollectorRegistry()
    made = {}

    def make_subscriber(handler):
        made["subscriber"] = Subscriber(cluster, handler)
        return made["subscriber"]

    lookup = Lookup(cluster)
    host = PointHost(
        core=ProbeHost("residual", set_fingerprint(bounds), runner, 60_000_000, keeping=keeping),
        runner=runner,
        make_subscriber=make_subscriber,
        transactor=Transactor(
            lambda: Writer(cluster),
            INPUTS,
            "verdicts",
            CODEC,
            service="probes",
            letter_bytes=100_000,
            stable=stable,
            beside=BESIDE,
            states=StatesTopic("states", "probes", INPUTS),
            deadline_s=0.2,
        ),
        aborts=AbortWriter(Publisher(cluster), "control", CODEC),
        lookup=lookup,
        codec=CODEC,
        clock=lambda: time.time_ns() // 1000,
        metrics=HostMetrics(ProbeMetrics(registry), "residual", DriftWatch(bounds, window_requests)),
        settings=LoopSettings(
            inputs=INPUTS,
            verdicts="verdicts",
            service="probes",
            fingerprint=set_fingerprint(bounds),
            start_from="earliest",
            change=change,
        ),
        executor=executor or AtOnce(),
        knows=knows,
        read_states=lambda partition, offset: [CODEC.decode(value) for value in cluster.states.values() if value],
    )
    # As `run` does, without the transaction that it is for.
    written, calls, fail = list(cluster.written), [*cluster.calls, "writer"], cluster.fail
    cluster.fail = []
    host._transactor.warm_up(HELLO, [0, 1], [(topic, 0) for topic in host._transactor.other_topics])
    cluster.written, cluster.calls, cluster.fail = written, calls, fail
    host.subscriber, host.lookup, host.registry, host.bounds = made["subscriber"], lookup, registry, bounds
    yield host


def turn_until(host, condition, most=200):
    for _ in range(most):
        host.turn()
        if condition():
            return
        host._next_transaction_s = host._resuming._next_s = 0.0
    raise AssertionError("it did not come true")


def whole_stream(name="r", first=0.0):
    stream = StreamBuilder(name)
    return [stream.start(), stream.block([0], [first, 0, 0, 0]), stream.end()]
