"""What it costs that no row past a request's end is published: a publisher with and without the table of lengths.

    KAFKA_HOME=... python -m benchmarks.request_ends [--seconds 6] [--pairs 6] [--seed 1] [--reading-only]

First the publisher's reading alone, in this process: frames of decode steps from a ring through the holding to encoded
records, microseconds of CPU per record; every token is known when its row is read, as it nearly always is. Then a real
vLLM under the worker's driver and a publisher process, sixteen requests at a time of 64 tokens, to Apache Kafka: visits
with and without the table in turn, in one order and the other. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.overhead import load
from benchmarks.overhead.processes import RING_BYTES, Heard, Meter
from engine_worker.driver import EngineDriver
from engine_worker.publisher_messages import Identity
from engine_worker.publisher_streams import StreamWriter
from engine_worker.publisher_telling import PublisherSettings
from engine_worker.publishing import PublisherProcess
from undercurrent.adapters.base import EngineDelta
from undercurrent.adapters.vllm.engine import VLLMEngine
from undercurrent.capture.frames import decode
from undercurrent.capture.holding import Holding
from undercurrent.capture.lengths import LengthTable
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.codec import Codec
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.protocol.messages import PromptRequest, Sampling
from undercurrent.protocol.worker_types import Defect, Prompt, RunKey
from undercurrent.spec import ExtractionPoint, parse_dict
from undercurrent.testing.brokers import Broker, apache_kafka
from undercurrent.testing.tiny_models import build_tiny_model
from undercurrent.testing.waiting import wait_until
from undercurrent.topics import Topic

REQUESTS = (1, 16, 64, 256)
STEPS_PER_DRAIN, DRAINS, ROUNDS = 2, 150, 7
CONCURRENCY, TOKENS = 16, 64
TOPIC = "bench.activations"


def bench_point() -> ExtractionPoint:
    """Return the point of every variant: all layers of every token."""
    return parse_dict(load.spec_of(list(range(load.LAYERS)))).extraction_points[0]


class Reading:
    """Decode steps of some requests, read as the publisher does."""

    def __init__(self, requests: int, *, slotted: bool) -> None:
        self.ring = Ring.create(RING_BYTES)
        point = CapturePoint.of(bench_point(), layers=load.LAYERS, width=load.WIDTH, model_dtype=load.DTYPE)
        buffer = np.ones((requests, point.row_bytes), np.uint8)
        self._tracker = Tracker([point], {point.group: buffer}, self.ring.writer())
        self._table = LengthTable(self.ring.lengths)
        self._reader = self.ring.reader()
        self._holding = Holding(self.ring.lengths, max_bytes=RING_BYTES) if slotted else None
        topics, most = {point.name: TOPIC}, {point.name: 1_000_000}
        self._streams = StreamWriter(Codec(), Identity(engine="e", incarnation=1, model="m"), topics, most)
        self._slots = [self._table.take(1) for _ in range(requests)]
        self._computed = np.zeros(requests, np.int32)
        starts = np.arange(requests + 1, dtype=np.int32)
        ids = [f"r{number}" for number in range(requests)]
        self._batch = Batch(0, requests, ids, self._computed, starts, np.zeros(requests, np.int32))
        for name, slot in zip(ids, self._slots, strict=True):
            order = Order(request_id=name, attempt=1, points=(point.name,), partition=0, slot=slot if slotted else -1)
            self._tracker.open(name, order, index=0, prompt_len=1, cached_prefix=0)

    def cost_us(self) -> float:
        """Return the CPU time of reading one record, microseconds."""
        spent = 0
        for _ in range(DRAINS):
            for _ in range(STEPS_PER_DRAIN):
                self._batch.step += 1
                self._tracker.step(self._batch)
                self._computed += 1
            for slot in self._slots:
                self._table.tell(slot, 0, int(self._computed[0]) + 1)
            began = time.thread_time_ns()
            self._drain()
            spent += time.thread_time_ns() - began
        return spent / 1e3 / (DRAINS * STEPS_PER_DRAIN * len(self._slots))

    def _drain(self) -> None:
        contents = (
            self._holding.read(self._reader)
            if self._holding is not None
            else (decode(frame) for frame in self._reader.read())
        )
        for content in contents:
            self._streams.take(content, 0)
        self._reader.release()
        self._streams.cycle()


def reading() -> dict[str, dict[str, float]]:
    """Return the cost per record without and with the table, and the difference, by number of requests."""
    found: dict[str, dict[str, float]] = {}
    for requests in REQUESTS:
        sides = {slotted: Reading(requests, slotted=slotted) for slotted in (False, True)}
        costs: dict[bool, list[float]] = {False: [], True: []}
        for number in range(ROUNDS):
            for slotted in (False, True) if number % 2 else (True, False):
                costs[slotted].append(sides[slotted].cost_us())
        before, after = float(np.median(costs[False])), float(np.median(costs[True]))
        per_step = (after - before) * requests
        found[str(requests)] = {
            "without_us": round(before, 2), "with_us": round(after, 2), "added_us_per_step": round(per_step, 1)
        }  # fmt: skip
        print(f"reading, {requests:3d} requests: {before:.2f} us a record, {after:.2f} with lengths; "
              f"{per_step:.1f} us a step")  # fmt: skip
    return found


class Users:
    """Sixteen requests at a time through one driver."""

    def __init__(self, engine: VLLMEngine, lengths: LengthTable | None) -> None:
        self._driver = EngineDriver(engine, self, lengths)
        self._ends: dict[RunKey, asyncio.Event] = {}
        self.tokens = self.requests = 0

    def on_delta(self, key: RunKey, delta: EngineDelta, generated: int) -> None:
        """Count, and let its user go on at its end."""
        self.tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._ends[key].set()

    def on_rejected(self, key: RunKey, defect: Defect) -> None:
        """No request of a benchmark is refused."""
        raise SystemExit(defect.error)

    def on_failure(self, error: BaseException) -> None:
        """No engine of a benchmark dies."""
        raise SystemExit(str(error))

    async def visit(self, seconds: float, names: Iterator[int]) -> None:
        """Keep requests going for so long, and let the last ones end."""
        until_s = time.monotonic() + seconds

        async def user(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < until_s:
                key = RunKey(f"r{next(names)}", 1)
                self._ends[key] = asyncio.Event()
                self._driver.start(key, _prompt(key, rng, number))
                await self._ends[key].wait()
                del self._ends[key]
                self.requests += 1

        await asyncio.gather(*(user(number) for number in range(CONCURRENCY)))

    def free(self) -> None:
        """Give its slots back."""
        self._driver.free(lambda _: False)


def _prompt(key: RunKey, rng: random.Random, number: int) -> Prompt:
    request = PromptRequest(
        request_id=key.request_id,
        prompt_token_ids=tuple(rng.randrange(256) for _ in range(rng.randrange(16, 33))),
        sampling=Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        created_at_us=0,
    )
    return Prompt(
        request_id=key.request_id,
        offset=0,
        content_hash=b"",
        points=(load.POINT,),
        stream_partition=number % load.PARTITIONS,
        request=request,
    )


def publisher_of(ring: Ring, broker: Broker) -> tuple[Heard, PublisherProcess]:
    """Return a publisher that reads the ring, and what it says."""
    heard = Heard()
    publisher = PublisherProcess(lambda call: call(), heard)
    publisher.start(
        PublisherSettings(
            ring=ring.path,
            identity=Identity(engine="bench", incarnation=1, model="tiny"),
            kafka={"bootstrap_servers": broker.bootstrap_servers},
            topics={load.POINT: TOPIC},
            partitions={load.POINT: load.PARTITIONS},
            max_record_bytes={load.POINT: 1_000_000},
        )
    )
    publisher.wait_ready(30)
    return heard, publisher


async def published(model: Path, broker: Broker, seconds: float, pairs: int, seed: int) -> dict[str, dict[str, float]]:
    """Return medians over visits without and with the table."""
    ring = Ring.create(RING_BYTES)
    engine = VLLMEngine(str(model), engine_args=load.ENGINE_ARGS, points=(bench_point(),), ring=ring)
    await engine.start()
    heard, publisher = publisher_of(ring, broker)
    figures: dict[str, list[dict[str, float]]] = defaultdict(list)
    rng, names = random.Random(seed), itertools.count()
    made = {"without": Users(engine, None), "with": Users(engine, LengthTable(ring.lengths))}
    await made["without"].visit(2.0, names)
    for _ in range(pairs):
        order = ["without", "with"]
        rng.shuffle(order)
        for name in order:
            await asyncio.to_thread(wait_until, lambda: ring.stats().used_bytes == 0, 30, "an empty ring")
            await asyncio.sleep(0.6)
            figures[name].append(await _visit(made[name], seconds, names, heard, Meter(publisher.pid, broker.pid)))
            print(name, figures[name][-1])
    await engine.close()
    await asyncio.to_thread(publisher.end)
    ring.close()
    return {
        name: {key: round(float(np.median([one[key] for one in visits])), 3) for key in visits[0]}
        for name, visits in sorted(figures.items())
    }


async def _visit(users: Users, seconds: float, names: Iterator[int], heard: Heard, meter: Meter) -> dict[str, float]:
    with heard.lock:
        heard.records, heard.ended, heard.publish_s = 0, 0, []
    users.tokens = users.requests = 0
    began = time.monotonic()
    await users.visit(seconds, names)
    took = time.monotonic() - began
    wanted = users.requests
    await asyncio.to_thread(wait_until, lambda: heard.ended >= wanted, 60, "the last acknowledgement")
    cpu = meter.read()
    users.free()
    p50, p90, p99 = (1e3 * float(v) for v in np.percentile(heard.publish_s, (50, 90, 99)))
    return {
        "captured_to_acknowledged_p50_ms": round(p50, 2),
        "captured_to_acknowledged_p90_ms": round(p90, 2),
        "captured_to_acknowledged_p99_ms": round(p99, 2),
        "publisher_us_per_record": round(1e6 * cpu["publisher"] / heard.records, 2),
        "tokens_per_s": round(users.tokens / took, 1),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reading-only", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {"reading": reading()}
    if not options.reading_only:
        with tempfile.TemporaryDirectory() as folder, apache_kafka() as broker:
            topic = Topic(name=TOPIC, partitions=load.PARTITIONS, retention_ms=600_000)
            TopicAdmin(broker.settings()).create([topic])
            model = Path(folder) / "model"
            build_tiny_model("llama", model, layers=load.LAYERS, width=load.WIDTH, max_len=256)
            work = published(model, broker, options.seconds, options.pairs, options.seed)
            result["published"] = asyncio.run(work)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
