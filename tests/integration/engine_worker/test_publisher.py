"""The publisher process: a real ring, a real broker, real bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from engine_worker.publisher import PublisherSettings
from engine_worker.publisher_streams import Identity
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.codec import Codec, as_array, positions, token_ids
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.reader import AssignedReader
from undercurrent.protocol.messages import ActivationBlock, PublisherStarted, StreamEnded, StreamStarted
from undercurrent.spec import parse_dict
from undercurrent.testing.brokers import apache_kafka
from undercurrent.testing.waiting import wait_until
from undercurrent.topics import TopicPlan

pytestmark = pytest.mark.kafka
CODEC = Codec()
WIDTH, LAYERS = 8, (0, 2)
SPEC = {
    "version": 1,
    "extraction_points": [
        {
            "name": "p",
            "layers": list(LAYERS),
            "tensor_type": "residual_stream",
            "position": "*",
            "execution_mode": "async",
            "queue_depth": 64,
        }
    ],
}


class Scene:
    """A ring with a tracker that plays the engine, and the publisher at its other end, with the plan's own limits."""

    def __init__(self, broker, plan, ring_bytes=1 << 20, width=WIDTH):
        self.topic = plan.activations("p")
        self.width = width
        self.ring = Ring.create(ring_bytes)
        point = CapturePoint.of(parse_dict(SPEC).extraction_points[0], layers=4, width=width, model_dtype="float32")
        self.buffer = np.zeros((64, point.row_bytes), np.uint8)
        self.tracker = Tracker([point], {point.group: self.buffer}, self.ring.writer())
        read_fd, write_fd = os.pipe()
        self.reports = os.fdopen(read_fd, "rb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine_worker.publisher", str(write_fd)],
            stdin=subprocess.PIPE, pass_fds=(write_fd,),
        )  # fmt: skip
        os.close(write_fd)
        kafka = broker.settings().with_room(plan.activation_bytes)
        settings = PublisherSettings(
            ring=self.ring.path, identity=Identity(engine="e", incarnation=3, model="m"),
            kafka={"bootstrap_servers": kafka.bootstrap_servers, **kafka.options}, topics={"p": self.topic},
            partitions={"p": plan.activation_partitions}, max_record_bytes={"p": plan.activation_bytes},
        )  # fmt: skip
        self.process.stdin.write(settings.to_json().encode() + b"\n")
        self.process.stdin.flush()
        self.steps = 0

    def until(self, name):
        """Read reports until one says something about `name`, and return that."""
        return wait_until(lambda: json.loads(self.reports.readline())[name], 60, name)

    def run(self, request, tokens, first=0):
        """Play `tokens` decode steps of one request; return the rows."""
        rows = np.random.default_rng(first).normal(size=(tokens, len(LAYERS), WIDTH)).astype("<f4")
        for i in range(tokens):
            self.steps += 1
            self.buffer[0] = np.frombuffer(rows[i].tobytes(), np.uint8)
            self.tracker.step(
                Batch(step=self.steps, rows=1, engine_ids=[request], computed=np.array([first + i], np.int32),
                      starts=np.array([0, 1], np.int32), token_ids=np.array([i], np.int32))
            )  # fmt: skip
        return rows

    def prefill(self, request, tokens):
        """Play one step that computes a whole prompt; return the rows."""
        self.steps += 1
        rows = np.random.default_rng(1).normal(size=(tokens, len(LAYERS), self.width)).astype("<f4")
        self.buffer[:tokens] = rows.reshape(tokens, -1).view(np.uint8)
        self.tracker.step(
            Batch(step=self.steps, rows=tokens, engine_ids=[request], computed=np.array([0], np.int32),
                  starts=np.array([0, tokens], np.int32), token_ids=np.arange(tokens, dtype=np.int32))
        )  # fmt: skip
        return rows

    def open(self, request, partition=0, prompt_len=1):
        order = Order(request_id=request, attempt=1, points=("p",), partition=partition)
        self.tracker.open(request, order, index=0, prompt_len=prompt_len, cached_prefix=0)

    def end(self):
        self.process.stdin.close()
        code = self.process.wait(30)
        self.reports.close()
        self.ring.close()
        return code


@contextmanager
def scene(broker, prefix, **options):
    plan = TopicPlan(prefix=prefix, points=("p",), activation_partitions=2)
    wanted = next(topic for topic in plan.topics() if topic.name == plan.activations("p"))
    TopicAdmin(broker.settings()).create([wanted])
    built = Scene(broker, plan, **options)
    try:
        yield built
    finally:
        if built.process.poll() is None:
            built.process.kill()
            built.process.wait(10)
        built.process.stdin.close()
        built.reports.close()
        built.ring.close()


def read_all(broker, topic):
    with AssignedReader(broker.settings(), {(topic, 0): 0, (topic, 1): 0}) as reader:
        return [(r.partition, CODEC.decode(r.value)) for r in reader.read_to_end(30.0)]


def test_rows_arrive_bit_for_bit_and_their_end_is_reported_after_they_are_on_the_log(broker, topic_prefix):
    with scene(broker, topic_prefix) as s:
        s.until("ready")
        s.open("r1", partition=1)
        rows = s.run("r1", 40)
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        assert s.until("ended") == [["r1", 1, 0, "p"]]
        log = read_all(broker, s.topic)
        assert s.end() == 0
    assert sorted(p for p, m in log if isinstance(m, PublisherStarted)) == [0, 1]
    stream = [m for p, m in log if p == 1 and not isinstance(m, PublisherStarted)]
    assert isinstance(stream[0], StreamStarted)
    assert isinstance(stream[-1], StreamEnded)
    assert [m.seq for m in stream] == list(range(42))
    blocks = [m for m in stream if isinstance(m, ActivationBlock)]
    assert np.concatenate([positions(b) for b in blocks]).tolist() == list(range(40))
    assert b"".join(as_array(b).tobytes() for b in blocks) == rows.tobytes()


def test_a_prefill_larger_than_a_record_may_be_arrives_in_parts(broker, topic_prefix):
    with scene(broker, topic_prefix, ring_bytes=16 << 20, width=4096) as s:
        s.until("ready")
        s.open("r1", prompt_len=64)
        rows = s.prefill("r1", 64)
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        assert s.until("ended") == [["r1", 1, 0, "p"]]
        log = [m for _, m in read_all(broker, s.topic) if not isinstance(m, PublisherStarted)]
        assert s.end() == 0
    assert rows.nbytes == 2 << 20
    started, *blocks, ended = log
    assert (type(started), type(ended)) == (StreamStarted, StreamEnded)
    assert [m.seq for m in log] == list(range(len(blocks) + 2))
    assert {b.step for b in blocks} == {1}
    # Two of them would hold it if their other fields took no room.
    assert [len(positions(b)) for b in blocks] == [31, 31, 2]
    assert np.concatenate([positions(b) for b in blocks]).tolist() == list(range(64))
    assert np.concatenate([token_ids(b) for b in blocks]).tolist() == list(range(64))
    assert b"".join(as_array(b).tobytes() for b in blocks) == rows.tobytes()
    assert (ended.emitted, ended.dropped, ended.last_pos) == ((64, 64), (0, 0), 63)


def test_what_is_in_the_ring_is_published_before_it_ends(broker, topic_prefix):
    with scene(broker, topic_prefix) as s:
        s.until("ready")
        s.open("r1")
        s.run("r1", 500)
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        assert s.end() == 0
    assert sum(isinstance(m, ActivationBlock) for _, m in read_all(broker, s.topic)) == 500


def test_signals_to_the_whole_group_do_not_end_it_before_its_parent_says_so(broker, topic_prefix):
    with scene(broker, topic_prefix) as s:
        s.until("ready")
        s.process.send_signal(signal.SIGTERM)
        s.process.send_signal(signal.SIGINT)
        s.open("r1")
        s.run("r1", 5)
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        assert s.until("ended") == [["r1", 1, 0, "p"]]
        assert s.end() == 0


def test_a_parent_that_is_gone_takes_it_along(broker, topic_prefix):
    with scene(broker, topic_prefix) as s:
        s.until("ready")
        s.reports.close()
        s.open("r1")
        s.run("r1", 3)
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        assert s.process.wait(30) != 0


@pytest.mark.faults
def test_a_broker_that_stands_still_costs_no_cpu_and_loses_nothing(topic_prefix):
    with apache_kafka() as broker, scene(broker, topic_prefix) as s:
        s.until("ready")
        watched = psutil.Process(s.process.pid)
        s.open("r1")
        s.run("r1", 32)
        broker.pause()
        try:
            began, cpu = time.monotonic(), sum(watched.cpu_times()[:2])
            for i in range(32):
                s.run("r1", 4, first=32 + 4 * i)
                time.sleep(0.05)
            share = (sum(watched.cpu_times()[:2]) - cpu) / (time.monotonic() - began)
        finally:
            broker.resume()
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        s.until("ended")
        assert s.end() == 0
        blocks = [m for _, m in read_all(broker, s.topic) if isinstance(m, ActivationBlock)]
    assert [b.seq for b in blocks] == list(range(1, 161))
    # A core that spins for the whole time would be 1.0.
    assert share < 0.2


@pytest.mark.faults
def test_a_full_ring_is_a_declared_gap_and_the_engine_goes_on(topic_prefix):
    with apache_kafka() as broker, scene(broker, topic_prefix, ring_bytes=64 << 10) as s:
        s.until("ready")
        s.open("r1")
        s.run("r1", 4)
        broker.pause()
        try:
            s.run("r1", 3000, first=4)
        finally:
            broker.resume()
        s.tracker.close("r1")
        # What finds no room waits with the writer, which tries again in each of its steps.
        wait_until(lambda: s.tracker.idle(s.steps) or s.ring.stats().pending_controls == 0, 60, "room in the ring")
        s.until("ended")
        assert s.end() == 0
        log = [m for _, m in read_all(broker, s.topic)]
    ended = next(m for m in log if isinstance(m, StreamEnded))
    blocks = [m for m in log if isinstance(m, ActivationBlock)]
    assert ended.emitted == (len(blocks),) * 2
    assert ended.dropped == (3004 - len(blocks),) * 2
    assert ended.dropped[0] > 0
    assert ended.seq - 1 - len(blocks) == ended.dropped[0]
