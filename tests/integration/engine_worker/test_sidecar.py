"""The publisher of a bare server's worker: it lives as long as its worker, is replaced when it dies, and drains."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from undercurrent.adapters.vllm.sidecar import Sidecar, SidecarStart
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint
from undercurrent.capture.ring import Ring
from undercurrent.capture.server_orders import ServerOrders, ServerRules
from undercurrent.capture.tracker import Tracker
from undercurrent.codec import Codec
from undercurrent.errors import CaptureError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.reader import AssignedReader
from undercurrent.protocol.messages import ActivationBlock, EndReason, PublisherStarted, StreamEnded, StreamStarted
from undercurrent.spec import parse_dict
from undercurrent.testing.waiting import wait_until
from undercurrent.topics import TopicPlan

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]
CODEC = Codec()
POINT = {
    "name": "p", "layers": [0, 2], "tensor_type": "residual_stream", "position": "*", "execution_mode": "async",
    "queue_depth": 64,
}  # fmt: skip

TELL = """
import os, sys
from engine_worker.server_lengths import ServerLengths
lengths = ServerLengths.of([(sys.argv[1], os.stat(sys.argv[1]).st_ino)], index=0, count=1)
print(lengths.take("cut"), flush=True)
lengths.counted("cut", 5)
sys.stdin.read()
"""
"""An API server that has told its client of five tokens, prompt included."""

STUCK = """
import sys, time
from engine_worker import sidecar
sidecar._END_S = 0.1
sidecar.owner_watch(int(sys.argv[1]))
time.sleep(100)
"""
"""A publisher that hears of nothing."""


class Worker:
    """A ring with a tracker that plays a worker of vLLM, under the pid of a process that can be ended."""

    def __init__(self, settings, prefix, folder):
        self.settings = settings
        self.plan = TopicPlan(prefix=prefix, points=("p",), activation_partitions=2)
        self.topic = self.plan.activations("p")
        (folder / "points.yaml").write_text(yaml.safe_dump({"version": 1, "extraction_points": [POINT]}))
        self.file = folder / "capture.yaml"
        self.file.write_text(
            yaml.safe_dump(
                {
                    "kafka": settings.keys(),
                    "topics": {"prefix": prefix, "activation_partitions": 2},
                    "points": "points.yaml",
                }
            )
        )
        self.ring = Ring.create(1 << 20)
        spec = parse_dict({"version": 1, "extraction_points": [POINT]})
        point = CapturePoint.of(spec.extraction_points[0], layers=4, width=8, model_dtype="float32")
        self.buffer = np.zeros((64, point.row_bytes), np.uint8)
        self.tracker = Tracker([point], {point.group: self.buffer}, self.ring.writer())
        self.orders = ServerOrders(ServerRules(points=("p",), always=("p",), partitions=2))
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.sidecar = Sidecar(
            SidecarStart(
                settings=str(self.file),
                ring=self.ring.path,
                engine="chat-0.dp0",
                model="m",
                folder="",
                owner_pid=self.process.pid,
                cpus=tuple(os.sched_getaffinity(0)),
            )
        )
        self.step = 0

    def open(self, name, slot=-1):
        order = self.orders.take(name, None, slot).order
        self.tracker.open(name, order, index=0, prompt_len=1, cached_prefix=0)

    def run(self, name, tokens, first=0):
        for position in range(first, first + tokens):
            self.step += 1
            self.tracker.step(
                Batch(step=self.step, rows=1, engine_ids=[name], computed=np.array([position], np.int32),
                      starts=np.array([0, 1], np.int32), token_ids=np.array([position], np.int32))
            )  # fmt: skip

    def messages(self, *kinds):
        with AssignedReader(self.settings, {(self.topic, 0): 0, (self.topic, 1): 0}) as reader:
            found = [CODEC.decode(record.value) for record in reader.read_to_end(30.0)]
        return [message for message in found if isinstance(message, kinds)]

    def publisher(self):
        """Return the processes that have this ring mapped, but for this one."""
        inode, found = Path(self.ring.path).stat().st_ino, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                mapped = (
                    Path(f"/proc/{process.pid}/maps").read_text().splitlines() if process.pid != os.getpid() else []
                )
                found += (
                    [process] if any("undercurrent-ring" in line and f" {inode} " in line for line in mapped) else []
                )
        return found


@pytest.fixture
def worker(embedded_broker, topic_prefix, tmp_path):
    made = Worker(embedded_broker.settings(), topic_prefix, tmp_path)
    yield made
    made.process.kill()
    made.process.wait(10)
    made.process.stdin.close()
    wait_until(lambda: not made.publisher(), 40, "the publisher's end")


def test_it_is_replaced_when_it_dies_and_drains_when_its_worker_does(worker):
    TopicAdmin(worker.settings).apply(worker.plan)
    worker.sidecar.start()
    worker.sidecar.wait_ready(60)
    worker.open("first")
    worker.run("first", 5)
    wait_until(lambda: len(worker.messages(ActivationBlock)) == 5, 60, "five rows")
    (publisher,) = worker.publisher()
    assert publisher.ppid() != os.getpid(), "whoever kills all that is below the worker does not kill this"
    publisher.kill()
    # What comes while nobody reads is not lost, and what the dead one had opened is left out.
    worker.run("first", 3, first=5)
    worker.open("second")
    worker.run("second", 4)
    wait_until(lambda: len(worker.messages(StreamStarted)) == 2, 60, "the second stream")
    incarnations = [message.incarnation for message in worker.messages(PublisherStarted)]
    assert len(set(incarnations)) == 2
    second = [block for block in worker.messages(ActivationBlock) if block.request_id == "second"]
    assert {block.incarnation for block in second} == {max(incarnations)}
    worker.run("second", 2, first=4)
    worker.tracker.close("first")
    worker.process.stdin.close()
    ((ended),) = wait_until(lambda: worker.messages(StreamEnded), 60, "an end")
    assert (ended.request_id, ended.reason, ended.emitted) == ("second", EndReason.LOST, (6, 6))


def test_rows_wait_for_their_api_server_and_are_lost_with_it(worker):
    TopicAdmin(worker.settings).apply(worker.plan)
    worker.sidecar.start()
    worker.sidecar.wait_ready(60)
    teller = subprocess.Popen(
        [sys.executable, "-c", TELL, worker.ring.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        worker.open("cut", int(teller.stdout.readline()))
        worker.run("cut", 8)
        worker.tracker.close("cut")
        wait_until(lambda: len(worker.messages(ActivationBlock)) == 5, 60, "the rows of five tokens")
        assert worker.messages(StreamEnded) == []
    finally:
        teller.kill()
        teller.communicate()
    ((ended),) = wait_until(lambda: worker.messages(StreamEnded), 60, "an end")
    assert (ended.reason, ended.emitted, ended.dropped) == (EndReason.FINISHED, (5, 5), (3, 3))
    # The next one is of nobody: it leaves at once.
    worker.open("free")
    worker.run("free", 3)
    worker.tracker.close("free")
    wait_until(lambda: len(worker.messages(StreamEnded)) == 2, 60, "another end")


def test_what_it_cannot_do_stops_the_start_by_name(worker):
    worker.sidecar.start()
    began = time.monotonic()
    with pytest.raises(CaptureError, match=r"activations\.p"):
        worker.sidecar.wait_ready(60)
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("how", ["killed", "gone before", "closed its end"])
def test_it_ends_soon_after_its_worker_whatever_it_waits_for(how):
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if how == "gone before":
        owner.kill()
        owner.communicate()
    publisher = subprocess.Popen([sys.executable, "-c", STUCK, str(owner.pid)], stdin=subprocess.PIPE)
    try:
        if how == "killed":
            owner.kill()
        elif how == "closed its end":
            publisher.stdin.close()
        assert publisher.wait(30) == 1
    finally:
        publisher.kill()
        publisher.wait(10)
        publisher.stdin.close()
        owner.kill()
        owner.communicate()
