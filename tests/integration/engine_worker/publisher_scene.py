"""A ring with a tracker that plays the engine, and a publisher process at its other end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import numpy as np

from engine_worker.announcing import announce_and_wait
from engine_worker.publisher_cycle import Bound
from engine_worker.publisher_messages import Identity
from engine_worker.publisher_telling import PublisherSettings
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.codec import Codec
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.reader import AssignedReader
from undercurrent.spec import Overflow, parse_dict
from undercurrent.testing.waiting import wait_until
from undercurrent.topics import TopicPlan

CODEC = Codec()
WIDTH, LAYERS = 8, (0, 2)


def spec_points(names, **fields):
    """Points of a pipeline at two layers."""
    values = {
        "layers": list(LAYERS), "tensor_type": "residual_stream", "position": "*", "execution_mode": "async",
        "queue_depth": 4096, **fields,
    }  # fmt: skip
    return parse_dict(
        {"version": 1, "extraction_points": [{**values, "name": name} for name in names]}
    ).extraction_points


class Scene:
    """See the module, with the plan's own limits.

    Args:
        broker: where it publishes to.
        plan: of the topics, which are there.
        points: of a spec.
        settings: changes to what the publisher is told.
        spawn: starts the publisher as a process of its own.
    """

    def __init__(
        self, broker, plan, points, *, ring_bytes=1 << 20, width=WIDTH, spawn=True, block_timeout_s=1.0, **settings
    ):
        self.plan, self.width = plan, width
        self.topic = plan.activations("p") if "p" in plan.points else ""
        self.names = tuple(point.name for point in points)
        self.ring = Ring.create(ring_bytes, slots=64)
        captured = [CapturePoint.of(point, layers=4, width=width, model_dtype="float32") for point in points]
        (group,) = {point.group for point in captured}
        self.buffer = np.zeros((64, group.row_bytes), np.uint8)
        self.tracker = Tracker(captured, {group: self.buffer}, self.ring.writer(), block_timeout_s=block_timeout_s)
        kafka = broker.settings().with_room(plan.activation_bytes)
        topics = {name: plan.activations(name) for name in self.names}
        told = {
            "ring": self.ring.path, "identity": Identity(engine="e", incarnation=3, model="m"),
            "kafka": kafka.keys(), "topics": topics,
            "acks": plan.acks,
            "partitions": dict.fromkeys(self.names, plan.activation_partitions),
            "max_record_bytes": dict.fromkeys(self.names, plan.activation_bytes),
            "bounds": {p.name: Bound(p.overflow or Overflow.DROP_NEWEST, p.queue_depth) for p in points},
        }  # fmt: skip
        self.settings = PublisherSettings(**{**told, **settings})
        self.process = self.reports = None
        self.told = []
        if spawn:
            self._spawn()
        self.steps = 0

    def _spawn(self):
        read_fd, write_fd = os.pipe()
        self.reports = os.fdopen(read_fd, "rb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine_worker.publisher", str(write_fd)],
            stdin=subprocess.PIPE, pass_fds=(write_fd,),
        )  # fmt: skip
        os.close(write_fd)
        self.process.stdin.write(self.settings.to_json().encode() + b"\n")
        self.process.stdin.flush()

    def until(self, name, timeout_s=60):
        """Read reports until one says something about `name`, and return that."""

        def heard():
            line = self.reports.readline()
            assert line, "the publisher has ended"
            self.told.append(json.loads(line))
            return self.told[-1][name]

        return wait_until(heard, timeout_s, name)

    def counted(self, point, what):
        """Return a count of a point, of all reports so far; drops as a dictionary by reason."""
        found = [report["counts"][point][what] for report in self.told if point in report["counts"]]
        if what != "dropped":
            return sum(found)
        reasons = {reason for each in found for reason in each}
        return {reason: sum(each.get(reason, 0) for each in found) for reason in reasons}

    def run(self, request, tokens, first=0):
        """Play `tokens` decode steps of one request; return the rows."""
        rows = np.random.default_rng(first).normal(size=(tokens, len(LAYERS), self.width)).astype("<f4")
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

    def open(self, request, partition=0, prompt_len=1, points=None):
        """Open the streams of a request."""
        order = Order(request_id=request, attempt=1, points=points or self.names, partition=partition)
        self.tracker.open(request, order, index=0, prompt_len=prompt_len, cached_prefix=0)

    def close(self, request):
        """End them, and let the next step say so."""
        self.tracker.close(request)
        self.steps += 1
        self.tracker.idle(self.steps)

    def end(self):
        """Ask the publisher to end; return its exit code."""
        self.process.stdin.close()
        code = self.process.wait(60)
        for line in self.reports:
            self.told.append(json.loads(line))
        self.reports.close()
        self.ring.close()
        return code

    def kill(self):
        """Leave nothing behind."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(10)
            self.process.stdin.close()
            self.reports.close()
        self.ring.close()


@contextmanager
def scene(broker, prefix, points=None, *, announced=False, **options):
    """Make the topics, and a scene of the points on them: of one called `p` where none are given.

    Args:
        broker: where.
        prefix: of the topics.
        points: of a spec.
        announced: its incarnation is one that was announced, so that others are above it.
        **options: of the scene.
    """
    points = points or spec_points(["p"])
    plan = TopicPlan(prefix=prefix, points=tuple(point.name for point in points), activation_partitions=2)
    wanted = {plan.acks, *(plan.activations(point.name) for point in points)}
    TopicAdmin(broker.settings()).create([topic for topic in plan.topics() if topic.name in wanted])
    if announced:
        publisher = Publisher(broker.settings())
        incarnation = announce_and_wait(publisher, plan.acks, "e", CODEC)
        publisher.close()
        options["identity"] = Identity(engine="e", incarnation=incarnation, model="m")
    built = Scene(broker, plan, points, **options)
    try:
        yield built
    finally:
        built.kill()


def read_all(broker, topic):
    """Return partition and message of every record of a topic."""
    with AssignedReader(broker.settings(), {(topic, 0): 0, (topic, 1): 0}) as reader:
        return [(r.partition, CODEC.decode(r.value)) for r in reader.read_to_end(30.0)]
