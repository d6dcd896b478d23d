"""The publisher beside raw produce() of the same bytes: from a full ring to the last acknowledgement.

While the publisher's process stands still a ring is filled as an engine fills it: decode steps of 64 requests at one
layer of 4096 x bfloat16, 8 KB a record, the length of each request told. Then it is let go, and the clock runs until it
reports that the broker has acknowledged the last of those streams' ends: frames, holding, numbering, encoding, bounds,
delivery. Raw is `Producer.produce` for each of the very records that it wrote, as they were read back from the topic,
poll and flush, with the publisher's own configuration and a linger of 5 ms; `raw_batch` hands over a whole cycle and
flushes as the publisher does, which is what the client library alone can do that way. Clients are connected before the
clock runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
from confluent_kafka import Producer

from benchmarks.stream_parts import Aim, Options, in_turn, ratio
from engine_worker.publisher_messages import Identity
from engine_worker.publisher_telling import PublisherSettings
from engine_worker.publishing import PublisherProcess
from undercurrent.capture.lengths import LengthTable
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.bulk import BulkPublisher, Outgoing
from undercurrent.kafka.client import idempotent_producer_config
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.spec import parse_dict
from undercurrent.testing.brokers import Broker
from undercurrent.topics import Topic

AIMS = {"publish_ratio": Aim(">=", 0.7)}

POINT, TOPIC, RAW_TOPIC, ACKS = "residual", "bench.publish", "bench.publish.raw", "bench.publish.acks"
WIDTH, REQUESTS, PARTITIONS = 4096, 64, 4
RING_BYTES = 192 << 20
SPEC = {
    "name": POINT, "layers": [1], "tensor_type": "residual_stream", "position": "*", "execution_mode": "async",
    "queue_depth": 4096,
}  # fmt: skip

Batches = Mapping[Partition, Sequence[Outgoing]]


class Source:
    """A ring and the requests that fill it, record by record of 8 KB.

    Args:
        seed: of the values.
        ring_bytes: of the ring.
    """

    def __init__(self, seed: int, ring_bytes: int = RING_BYTES) -> None:
        self.ring = Ring.create(ring_bytes, slots=2 * REQUESTS)
        (spec,) = parse_dict({"version": 1, "extraction_points": [SPEC]}).extraction_points
        point = CapturePoint.of(spec, layers=2, width=WIDTH, model_dtype="bfloat16")
        values = np.random.default_rng(seed).standard_normal((REQUESTS, WIDTH), np.float32)
        rows = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(REQUESTS, -1).copy()
        self._tracker = Tracker([point], {point.group: rows}, self.ring.writer())
        self._lengths = LengthTable(self.ring.lengths)
        self._slots: list[int] = []
        starts, tokens = np.arange(REQUESTS + 1, dtype=np.int32), np.arange(REQUESTS, dtype=np.int32)
        self._batch = Batch(0, REQUESTS, [], np.zeros(REQUESTS, np.int32), starts, tokens)
        self.steps = 0

    def begin(self) -> None:
        """Open 64 requests."""
        self._slots = [self._lengths.take(1) for _ in range(REQUESTS)]
        self._batch.engine_ids = [f"request-{self.steps}-{number}" for number in range(REQUESTS)]
        self._batch.computed[:] = 0
        for number, (name, slot) in enumerate(zip(self._batch.engine_ids, self._slots, strict=True)):
            order = Order(request_id=name, attempt=1, points=(POINT,), partition=number % PARTITIONS, slot=slot)
            self._tracker.open(name, order, index=0, prompt_len=1, cached_prefix=0)

    def fill(self, steps: int) -> None:
        """Play decode steps of all requests."""
        for _ in range(steps):
            self._batch.step += 1
            self._tracker.step(self._batch)
            self._batch.computed += 1
        self.steps += steps
        self._tell(final=False)
        assert self.ring.stats().dropped_rows == 0, "the ring was full"

    def end(self) -> None:
        """End all requests."""
        self._tell(final=True)
        for slot, name in zip(self._slots, self._batch.engine_ids, strict=True):
            self._tracker.close(name)
            self._lengths.free(slot, 1)
        self._batch.step += 1
        self._tracker.idle(self._batch.step)

    def _tell(self, *, final: bool) -> None:
        for slot in self._slots:
            self._lengths.tell(slot, 0, int(self._batch.computed[0]) + 1, final=final)


def publisher_settings(source: Source, kafka: KafkaSettings, topic: str, acks: str) -> PublisherSettings:
    """Return what a publisher of a source's records is told.

    Args:
        source: of the records.
        kafka: the connection.
        topic: the point's.
        acks: the topic that it answers to.
    """
    return PublisherSettings(
        ring=source.ring.path,
        identity=Identity(engine="bench", incarnation=0, model="none"),
        kafka=kafka.keys(),
        topics={POINT: topic},
        partitions={POINT: PARTITIONS},
        max_record_bytes={POINT: 1_000_000},
        acks=acks,
        log_level="WARNING",
    )


class Published:
    """The publisher's process at the other end of a source.

    Args:
        source: of the records.
        kafka: the connection.
        max_cycle_bytes: of the publisher.
    """

    def __init__(self, source: Source, kafka: KafkaSettings, max_cycle_bytes: int = 32 << 20) -> None:
        self._ended, self._all_ended = 0, threading.Event()
        self._source = source
        self._publisher = PublisherProcess(lambda call: call(), self)
        settings = publisher_settings(source, kafka, TOPIC, ACKS)
        self._publisher.start(replace(settings, max_cycle_bytes=max_cycle_bytes))
        self._publisher.wait_ready(60)
        self.cpu_us: list[float] = []

    def rate(self, steps: int) -> float:
        """Return records per second of so many steps of all requests."""
        process, records = psutil.Process(self._publisher.pid), steps * REQUESTS
        process.suspend()
        self._source.begin()
        self._source.fill(steps)
        self._source.end()
        self._ended = 0
        self._all_ended.clear()
        before, began_s = sum(process.cpu_times()[:2]), time.perf_counter()
        process.resume()
        assert self._all_ended.wait(120)
        took_s = time.perf_counter() - began_s
        self.cpu_us.append(1e6 * (sum(process.cpu_times()[:2]) - before) / records)
        return records / took_s

    def close(self) -> None:
        """End the process."""
        self._publisher.end()

    def on_report(self, report: dict[str, Any]) -> None:
        """Count ends."""
        assert not report["refused"]
        self._ended += len(report["ended"])
        if self._ended == REQUESTS:
            self._all_ended.set()

    def on_publisher_gone(self, error: BaseException) -> None:
        """No publisher dies here."""
        raise error


class Raw:
    """The client library alone.

    Args:
        kafka: the connection.
        batches: the records, of each partition in its order.
    """

    def __init__(self, kafka: KafkaSettings, batches: Batches) -> None:
        self._batches = batches
        self._count = sum(map(len, batches.values()))
        # In the order in which their steps were computed, as a loop that produces them would meet them.
        by_step = zip(*(records for _, records in sorted(batches.items())), strict=True)
        self._in_turn = [(number, *record) for records in by_step for number, record in enumerate(records)]
        self._producer = Producer(idempotent_producer_config(kafka))
        self._bulk = BulkPublisher(kafka)
        self.cpu_us: list[float] = []
        for one in batches:
            self._producer.produce(one.topic, b"first", partition=one.number)
        self._producer.flush()
        self._bulk.write({where: [Outgoing(None, b"first")] for where in batches})

    def rate(self) -> float:
        """Return records per second, one call each."""
        producer, began_s, cpu_s = self._producer, time.perf_counter(), time.process_time()
        for partition, key, value in self._in_turn:
            producer.produce(RAW_TOPIC, value, key, partition)
            producer.poll(0)
        producer.flush()
        self.cpu_us.append(1e6 * (time.process_time() - cpu_s) / self._count)
        return self._count / (time.perf_counter() - began_s)

    def batch_rate(self) -> float:
        """Return records per second, one call per partition."""
        began_s = time.perf_counter()
        self._bulk.write(self._batches)
        return self._count / (time.perf_counter() - began_s)

    def close(self) -> None:
        """End its clients."""
        self._producer.close()
        self._bulk.close()


def written(broker: Broker) -> Batches:
    """Return the records of rows on the publisher's topic, as they are to be produced to the other one."""
    starts = {(TOPIC, number): 0 for number in range(PARTITIONS)}
    found: dict[Partition, list[Outgoing]] = {}
    with AssignedReader(broker.settings(), starts) as reader:
        for record in reader.read_to_end(120.0):
            if record.value is not None and len(record.value) > 2 * WIDTH:
                found.setdefault(Partition(RAW_TOPIC, record.partition), []).append(Outgoing(record.key, record.value))
    return found


def measure(broker: Broker, options: Options) -> dict[str, float]:
    """Return `publish_ratio`, the rates behind it, and what a record costs."""
    topics = [Topic(name=name, partitions=PARTITIONS, retention_ms=60_000) for name in (TOPIC, RAW_TOPIC)]
    TopicAdmin(broker.settings()).create([*topics, Topic(name=ACKS, partitions=1, retention_ms=600_000)])
    kafka = broker.settings().with_room(1_048_588)
    frame_bytes = REQUESTS * (2 * WIDTH + 16) + 4096
    steps = min(RING_BYTES * 9 // 10 // frame_bytes, max(8, int(options.seconds * 16 * 1024 * 1024 / frame_bytes)))
    source = Source(options.seed)
    published = Published(source, kafka)
    published.rate(steps)
    raw = Raw(kafka, written(broker))
    # A broker that has just started is slow.
    raw.rate()
    sides = {"publisher": lambda: published.rate(steps), "raw": raw.rate, "raw_batch": raw.batch_rate}
    found = in_turn(sides, options)
    published.close()
    raw.close()
    source.ring.close()
    medians = {side: float(np.median(rates)) for side, rates in found.items()}
    for side, rate in medians.items():
        each = " ".join(f"{one:,.0f}" for one in found[side])
        print(f"{side:10} {rate:9,.0f} records/s, {rate * 2 * WIDTH / 1e6:4,.0f} MB/s; rounds: {each}")
    return {
        "publish_ratio": ratio(found, "publisher", "raw"),
        "publish_ratio_to_batches": ratio(found, "publisher", "raw_batch"),
        "publish_records_per_s": medians["publisher"],
        "publish_cpu_us_per_record": float(np.median(published.cpu_us[1:])),
        "publish_raw_cpu_us_per_record": float(np.median(raw.cpu_us[1:])),
    }
