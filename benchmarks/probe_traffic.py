"""Traffic for probe hosts, and hosts that read it: what the parts of `benchmarks.streams` about them have in common."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from confluent_kafka import Consumer, Producer, TopicPartition
from prometheus_client import CollectorRegistry

from probe_consumers.__main__ import build, read_config
from probe_consumers.observer import Watched
from probe_consumers.transactor import Transactor
from undercurrent.codec import BlockEncoder, Codec
from undercurrent.codec.tensors import bytes_of
from undercurrent.kafka.client import Assignor, Isolation, group_consumer_config, idempotent_producer_config
from undercurrent.service.processes import spare_collector
from undercurrent.testing.brokers import Broker
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.streams import StreamBuilder

WIDTH, REQUESTS, TOKENS_PER_REQUEST = 4096, 64, 256
RECORD_BYTES = 2 * WIDTH
BATCH = 2000
_LIMIT_S = 300.0


class Traffic:
    """Decode steps of 64 requests at one layer of 4096 x bfloat16, 8 KB a record, and a linear probe for them.

    Args:
        broker: where the topics go.
        folder: for configurations and the probe.
        partitions: of the point.
        options: of hosts' clients.
        assignor: of their group.
        others: points at which the same is captured; a second probe joins all.
    """

    def __init__(
        self,
        broker: Broker,
        folder: Path,
        partitions: int = 4,
        options: Mapping[str, str | int] = MappingProxyType({}),
        *,
        assignor: Assignor = Assignor.COOPERATIVE_STICKY,
        others: Sequence[str] = (),
    ) -> None:
        settings = broker.settings(**options)
        self.bench = ProbeBench(settings, folder, partitions=partitions, assignor=assignor, others=others)
        self.group = ""
        weight = np.random.default_rng(2).standard_normal(WIDTH).astype(np.float32)
        # Its aggregate stays far below: what aborts cost is another part's subject.
        self.bench.save_linear("guard", weight, threshold=1e9, aggregation={"kind": "mean"})
        both = np.tile(weight, 1 + len(others))
        self.bench.save_linear("both", both, threshold=1e9, aggregation={"kind": "mean"})

    def load(self, records: int, seed: int) -> int:
        """Append so many activations of each point, request after request as they end and begin.

        Returns:
            The records of one point's topic.
        """
        rows = np.random.default_rng(seed).standard_normal((REQUESTS, WIDTH)).astype(np.float32)
        data = [bytes_of(row, "bfloat16") for row in rows]
        producer = Producer(idempotent_producer_config(self.bench.settings.with_room(1 << 20)))
        streams: list[StreamBuilder] = []
        codec, encoders = Codec(), list[BlockEncoder]()
        written = 0
        points = self.bench.points
        topics = [self.bench.plan.activations(point) for point in points] * REQUESTS
        data = [one for one in data for _ in points]

        def put(topic: str, stream: StreamBuilder, value: bytes) -> None:
            nonlocal written
            while True:
                try:
                    producer.produce(topic, value, stream.key, self.bench.partition(stream.key))
                except BufferError:
                    producer.poll(0.05)
                else:
                    break
            written += 1

        for step in range(records // REQUESTS):
            at = step % TOKENS_PER_REQUEST
            if at == 0:
                for topic, stream in zip(topics, streams, strict=False):
                    put(topic, stream, stream.end())
                streams = [
                    StreamBuilder(f"r{seed}-{step}-{number}", width=WIDTH, dtype="bfloat16", point=point)
                    for number in range(REQUESTS)
                    for point in points
                ]
                for topic, stream in zip(topics, streams, strict=True):
                    put(topic, stream, stream.start())
                encoders = [BlockEncoder(codec, stream.activations([0], rows[0])) for stream in streams]
            position = np.int32(at).tobytes()
            for topic, stream, encoder, values in zip(topics, streams, encoders, data, strict=True):
                stream.next_seq = at + 2
                put(topic, stream, encoder.encode(at + 1, step, 0, position, bytes(4), values))
            producer.poll(0)
        for topic, stream in zip(topics, streams, strict=True):
            put(topic, stream, stream.end())
        producer.flush()
        return written // len(points)

    def configure(self, *, joined: bool = False, **keys: object) -> Path:
        """Return a configuration of a group of its own.

        Args:
            joined: its probe joins all points; else it reads the first one.
            keys: of the file.
        """
        first, *_ = points = self.bench.points
        plain = {"name": "guard", "point": first, "probe": "./guard", "mode": "flag"}
        joining = {"name": "both", "points": list(points), "probe": "./both", "mode": "flag"}
        bindings = [joining if joined else plain]
        name = f"g{uuid.uuid4().hex[:8]}"
        self.group = f"{self.bench.plan.prefix}.{name}.{self.bench.point if joined else first}"
        return self.bench.configure(bindings, group=name, **keys)

    def host_rate(self, records: int, transactor: type[Transactor] = Transactor, *, joined: bool = False) -> float:
        """Return records per second of a host in this process, from its first batch to its last commit.

        Args:
            records: that it is to read, of all points together.
            transactor: writes transactions.
            joined: its probe joins all points; else it reads the first one.
        """
        config = read_config(self.configure(joined=joined))
        [watched] = build(config, CollectorRegistry(), make_transactor=transactor)
        stop = threading.Event()
        spare_collector()  # as `serve` does
        thread = threading.Thread(target=watched.host.run, args=(stop,))
        thread.start()
        try:
            first, began = self._wait(watched, 1)
            last, ended = self._wait(watched, records)
        finally:
            stop.set()
            thread.join()
        return (last - first) / (ended - began)

    def _wait(self, watched: Watched, count: int) -> tuple[int, float]:
        deadline = time.monotonic() + _LIMIT_S
        while (done := sum(watched.host.emitted_up_to.values())) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{done} of {count} records after {_LIMIT_S:g} s")
            time.sleep(0.002)
        return done, time.perf_counter()

    def raw_rate(self, records: int) -> float:
        """Return records per second of the client alone, from its first batch to its last."""
        settings = self.bench.settings
        config = group_consumer_config(settings, f"raw-{uuid.uuid4().hex[:8]}", isolation=Isolation.READ_COMMITTED)
        consumer = Consumer(config)
        partitions: Sequence[TopicPartition] = [
            TopicPartition(self.bench.topic, number, 0) for number in range(self.bench.plan.activation_partitions)
        ]
        consumer.assign(list(partitions))
        done = first = 0
        began = 0.0
        while done < records:
            messages = consumer.consume(BATCH, 0.1)
            # Its bytes are what a reader wants of it: without them the client has not handed it over.
            done += sum(message.error() is None and message.value() is not None for message in messages)
            if messages and not began:
                began, first = time.perf_counter(), done
        rate = (done - first) / (time.perf_counter() - began)
        consumer.close()
        return rate
