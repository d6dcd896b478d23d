"""A publisher on a real Kafka that goes away, refuses, or breaks: what is bounded, what is kept, what is declared."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import psutil
import pytest

from engine_worker.publisher import bulk_publisher, clients, fitted
from engine_worker.publisher_loop import PublisherLoop
from engine_worker.publishing import PublisherProcess
from tests.integration.engine_worker.publisher_scene import read_all, scene, spec_points
from undercurrent.codec import positions
from undercurrent.errors import ProducerFatalError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.bulk import BulkPublisher
from undercurrent.protocol.messages import ActivationBlock, EndReason, PublisherStarted, StreamEnded, StreamStarted
from undercurrent.testing.brokers import apache_kafka
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]
_AWAY_S = 3.0


@pytest.fixture(scope="module")
def kafka():
    """A broker that these tests kill and stop."""
    with apache_kafka() as broker:
        yield broker


def streams_of(broker, topic):
    """Return the messages of each stream of a topic, in log order."""
    found = defaultdict(list)
    for _, message in read_all(broker, topic):
        if not isinstance(message, PublisherStarted):
            found[message.request_id].append(message)
    return found


def shown(messages):
    """Return the positions on the log, and the stream's end."""
    blocks = [message for message in messages if isinstance(message, ActivationBlock)]
    return [at for block in blocks for at in positions(block).tolist()], messages[-1]


def play_for(s, request, seconds, first=1):
    """Play steps for so long, as fast as an engine; return the next position."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        s.run(request, 5, first=first)
        first += 5
        time.sleep(0.002)
    return first


def stands(s):
    """Return whether no step was taken for a while."""
    steps = s.steps
    time.sleep(0.3)
    return s.steps == steps


def test_a_broker_that_was_killed_and_comes_back_costs_no_row(kafka, topic_prefix):
    # The ring alone holds a tenth of a second of it.
    with scene(kafka, topic_prefix, spec_points(["p"], queue_depth=1_000_000), ring_bytes=64 << 10) as s:
        s.until("ready")
        s.open("r1")
        s.run("r1", 1)
        s.until("counts")
        kafka.kill()
        try:
            end = play_for(s, "r1", _AWAY_S)
        finally:
            kafka.start()
        s.open("r2")
        s.run("r2", 3)
        for request in ("r1", "r2"):
            s.close(request)
        s.until("ended")
        assert s.end() == 0
    most = max(report["waiting_bytes"] for report in s.told)
    assert most > 2 * (64 << 10)
    assert s.told[-1]["waiting_bytes"] == 0
    found = streams_of(kafka, s.topic)
    at, ended = shown(found["r1"])
    assert at == list(range(end))
    assert [message.seq for message in found["r1"]] == list(range(end + 2))
    assert (ended.emitted, ended.dropped) == ((end, end), (0, 0))
    assert shown(found["r2"])[0] == [0, 1, 2]
    assert s.counted("p", "records") == end + 3


def test_a_broker_that_stands_still_costs_no_cpu_and_loses_nothing(kafka, topic_prefix):
    with scene(kafka, topic_prefix) as s:
        s.until("ready")
        watched = psutil.Process(s.process.pid)
        s.open("r1")
        s.run("r1", 32)
        kafka.pause()
        try:
            began, cpu = time.monotonic(), sum(watched.cpu_times()[:2])
            for i in range(32):
                s.run("r1", 4, first=32 + 4 * i)
                time.sleep(0.05)
            share = (sum(watched.cpu_times()[:2]) - cpu) / (time.monotonic() - began)
        finally:
            kafka.resume()
        s.tracker.close("r1")
        s.tracker.idle(s.steps + 1)
        s.until("ended")
        assert s.end() == 0
    assert shown(streams_of(kafka, s.topic)["r1"])[0] == list(range(160))
    # A core that spins for the whole time would be 1.0.
    assert share < 0.2


def test_each_point_s_policy_decides_what_waits_while_the_broker_stands_still(kafka, topic_prefix):
    points = (
        *spec_points(["newest"], queue_depth=8),
        *spec_points(["oldest"], queue_depth=8, overflow="drop_oldest"),
    )
    with scene(kafka, topic_prefix, points) as s:
        s.until("ready")
        s.open("r1")
        s.run("r1", 1)
        s.until("counts")
        kafka.pause()
        try:
            # In flight, and nothing is produced behind it.
            s.run("r1", 1, first=1)
            wait_until(lambda: s.ring.stats().used_bytes == 0, 30, "the ring to be read")
            s.run("r1", 200, first=2)
            wait_until(lambda: s.ring.stats().used_bytes == 0, 30, "the ring to be read on")
        finally:
            kafka.resume()
        s.close("r1")
        s.until("ended")
        assert s.end() == 0
    (first, first_end), (last, last_end) = (
        shown(streams_of(kafka, s.plan.activations(name))["r1"]) for name in ("newest", "oldest")
    )
    # Besides eight that waited: what was in flight, and what had not come that far when it froze.
    kept = len(first) - 8
    assert kept >= 2
    assert first == list(range(kept + 8))
    assert last == [*range(len(last) - 8), *range(194, 202)]
    for at, ended in ((first, first_end), (last, last_end)):
        assert ended.emitted == (len(at),) * 2
        assert ended.dropped == (202 - len(at),) * 2
        assert ended.seq == 203
    for name, at in (("newest", first), ("oldest", last)):
        assert s.counted(name, "dropped") == {"queue_depth": 2 * (202 - len(at))}
    assert s.ring.stats().dropped_rows == 0


def test_a_blocking_point_holds_up_the_engine_until_the_broker_is_back(kafka, topic_prefix):
    points = spec_points(["p"], queue_depth=8, overflow="block")
    with scene(kafka, topic_prefix, points, ring_bytes=16 << 10, block_timeout_s=120.0) as s:
        s.until("ready")
        s.open("r1")
        s.run("r1", 1)
        s.until("counts")
        engine = threading.Thread(target=s.run, args=("r1", 300), kwargs={"first": 1})
        kafka.pause()
        try:
            engine.start()
            wait_until(partial(stands, s), 60, "the engine to wait")
            assert engine.is_alive()
            assert s.ring.stats().full_events
        finally:
            kafka.resume()
        engine.join(60)
        assert not engine.is_alive()
        s.close("r1")
        s.until("ended")
        assert s.end() == 0
    at, ended = shown(streams_of(kafka, s.topic)["r1"])
    assert at == list(range(301))
    assert ended.dropped == (0, 0)


def test_a_record_above_what_the_topic_takes_now_costs_its_neighbours_nothing(kafka, topic_prefix):
    with scene(kafka, topic_prefix, ring_bytes=16 << 20, width=2048) as s:
        s.until("ready")
        TopicAdmin(kafka.settings()).apply(replace(s.plan, activation_bytes=100_000))
        # One cycle, one partition: sixty records of 16 KB, and one of half a megabyte.
        psutil.Process(s.process.pid).suspend()
        s.open("small")
        s.run("small", 60)
        s.open("big", prompt_len=30)
        s.prefill("big", 30)
        s.close("small")
        psutil.Process(s.process.pid).resume()
        assert s.until("ended") == [["small", 1, 0, "p"]]
        s.run("big", 1, first=30)
        s.close("big")
        s.until("ended")
        assert s.end() == 0
        # Whoever starts now knows what the topic takes.
        assert fitted(s.settings).max_record_bytes == {"p": 100_000}
        assert fitted(s.settings).kafka["message.max.bytes"] == 100_000
    found = streams_of(kafka, s.topic)
    at, ended = shown(found["small"])
    assert (at, ended.dropped) == (list(range(60)), (0, 0))
    assert [message.seq for message in found["small"]] == list(range(62))
    at, ended = shown(found["big"])
    assert (at, ended.emitted, ended.dropped) == ([30], (1, 1), (30, 30))
    assert [message.seq for message in found["big"]] == [0, 2, 3]
    assert sum(sum(report["refused"].values()) for report in s.told) == 1
    assert s.counted("p", "dropped") == {"refused": 60}


class Breaking(BulkPublisher):
    """Breaks once, in the middle of a write: some of it is on the log, and nobody can say how much."""

    def __init__(self, inner, at, before):
        self._inner, self._left, self._before = inner, at, before

    def write(self, batches, *, waiting=None):
        self._left -= 1
        if self._left:
            return self._inner.write(batches, waiting=waiting)
        self._before()
        waiting(0.0)
        (where, records), *_ = batches.items()
        self._inner.write({where: records[:1]}, waiting=waiting)
        raise ProducerFatalError("out of sequence")

    def abandon(self):
        self._inner.abandon()


def test_a_producer_that_breaks_is_replaced_under_another_incarnation(kafka, topic_prefix):
    asked = queue.SimpleQueue()
    reports = []
    with scene(kafka, topic_prefix, announced=True, spawn=False) as s:

        def meanwhile():
            s.run("old", 2, first=3)
            s.open("new", partition=1)
            s.run("new", 3)

        def stopping(_):
            try:
                return asked.get(timeout=0.02)()
            except queue.Empty:
                return False

        renew = clients(s.settings)
        bulk = Breaking(bulk_publisher(s.settings), 3, meanwhile)
        loop = PublisherLoop(s.settings, s.ring.reader(), bulk, reports.append, stopping, renew=renew)
        s.open("old")
        s.run("old", 1)
        thread = threading.Thread(target=loop.run)
        thread.start()
        wait_until(lambda: any(report.counts.get("p", {}).get("records") for report in reports), 60, "the first row")
        asked.put(lambda: s.run("old", 2, first=1) is None)
        wait_until(lambda: any(report.renewed for report in reports), 60, "another producer")
        s.run("old", 1, first=5)
        s.run("new", 1, first=3)
        for request in ("old", "new"):
            s.close(request)
        wait_until(lambda: sum(len(report.ended) for report in reports) == 2, 60, "both ends")
        asked.put(lambda: True)
        thread.join(60)
        loop.close()
    log = [message for _, message in read_all(kafka, s.topic)]
    incarnations = {message.incarnation for message in log if isinstance(message, PublisherStarted)}
    assert len(incarnations) == 2
    new = [message for message in log if getattr(message, "request_id", "") == "new"]
    assert {message.incarnation for message in new} == {max(incarnations)}
    assert [message.seq for message in new] == list(range(6))
    assert isinstance(new[-1], StreamEnded)
    old = [message for message in log if getattr(message, "request_id", "") == "old"]
    assert {message.incarnation for message in old} == {min(incarnations)}
    # Of two that were in flight one is there.
    assert [message.seq for message in old] == [0, 1, 2]
    assert sum((Counter(report.unknown) for report in reports), Counter()) == {"p": 2}
    dropped = sum((Counter(r.counts["p"]["dropped"]) for r in reports if "p" in r.counts), Counter())
    assert dropped == {"cut_off": 2 * 3}


class Heard:
    """What a worker's loop hears of its publisher."""

    def __init__(self):
        self.ended, self.gone, self.ready = [], [], 0

    def on_report(self, report):
        self.ended += [tuple(one) for one in report["ended"]]
        self.ready += report["ready"]

    def on_publisher_gone(self, error):
        self.gone.append(error)


def test_a_publisher_that_is_killed_is_replaced_and_the_engine_notices_nothing(kafka, topic_prefix):
    heard = Heard()
    publisher = PublisherProcess(lambda call: call(), heard)
    with scene(kafka, topic_prefix, announced=True, spawn=False) as s:
        publisher.start(s.settings)
        publisher.wait_ready(60)
        s.open("cut")
        s.run("cut", 5)
        wait_until(lambda: len(streams_of(kafka, s.topic)["cut"]) == 6, 60, "five rows")
        psutil.Process(publisher.pid).kill()
        s.run("cut", 5, first=5)
        s.open("whole")
        s.run("whole", 5)
        wait_until(lambda: heard.ready == 2, 60, "another publisher")
        for request in ("cut", "whole"):
            s.close(request)
        wait_until(lambda: heard.ended, 60, "an end")
        publisher.end()
        assert heard.ended == [("whole", 1, 0, "p")]
        assert len(heard.gone) == 1
    log = [message for _, message in read_all(kafka, s.topic)]
    first, second = sorted({message.incarnation for message in log if isinstance(message, PublisherStarted)})
    found = streams_of(kafka, s.topic)
    assert {message.incarnation for message in found["cut"]} == {first}
    assert {message.incarnation for message in found["whole"]} == {second}
    assert [message.seq for message in found["whole"]] == list(range(7))
    assert isinstance(found["whole"][0], StreamStarted)


def test_a_worker_waits_for_the_rows_of_requests_that_ended_while_brokers_were_away(kafka, tmp_path):
    with EngineBench(kafka.settings(), tmp_path) as bench:
        limits = {"stream_end_timeout_s": 2.0}
        worker = bench.start_worker(bench.configure(engine={"kind": "fake", "args": {"step_s": 0.01}}, limits=limits))
        worker.wait_ready()
        ids = bench.send(["long"] * 3, max_tokens=150)
        bench.wait(lambda: len(bench.between_tokens()) == 3, "all of them to run")
        kafka.pause()
        try:
            # They end after a second and a half at most, and two seconds later patience would be over.
            time.sleep(5.0)
        finally:
            kafka.resume()
        bench.wait_finals(ids)
        streams = bench.activations()
        for request_id in ids:
            (found,) = [messages for (name, _), messages in streams.items() if name == request_id]
            at, ended = shown(found)
            assert ([type(message) for message in found].count(StreamEnded), ended.reason) == (1, EndReason.FINISHED)
            assert ended.dropped == (0, 0)
            assert at == list(range(len("long") + 149))
