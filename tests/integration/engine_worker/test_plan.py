"""`undercurrent plan` against what an engine worker really leaves in Apache Kafka's log directories."""

from __future__ import annotations

import json
import random
import string
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine_worker.config import PublisherSection
from engine_worker.planning import Asked, figures
from undercurrent.capacity.model import read_model
from undercurrent.capacity.traffic import Traffic
from undercurrent.protocol.messages import ActivationBlock, PromptRequest, Sampling, StreamEnded, StreamStarted
from undercurrent.spec import ExtractionPoint, ProbeSpec
from undercurrent.testing.brokers import Broker
from undercurrent.testing.engine_bench import EngineBench

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120), pytest.mark.alone]

LAYERS, WIDTH, PROJECTED = 2, 256, 32
PARTITIONS = 2
WARM_UP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a run is given; requests come at random times, as from users who do not know each other."""

    codec: str
    requests: int
    gap_s: float
    prompt: int
    generated: int
    step_s: float
    interval_ms: float


# Several steps meet in a drain, or each has its own. Both times are far above what a busy machine needs for a step or a
# drain, so it is they that decide what a batch holds.
SERVED = {
    "decode-lz4": Served(codec="lz4", requests=40, gap_s=0.1, prompt=8, generated=24, step_s=0.05, interval_ms=200),
    "decode-zstd": Served(codec="zstd", requests=40, gap_s=0.1, prompt=8, generated=48, step_s=0.02, interval_ms=200),
    "prefill-zstd": Served(codec="zstd", requests=40, gap_s=0.1, prompt=60, generated=6, step_s=0.15, interval_ms=20),
}


def points(folder: Path) -> list[ExtractionPoint]:
    rng = np.random.default_rng(1)
    np.save(folder / "m.npy", rng.standard_normal((WIDTH, PROJECTED), np.float32))
    shapes = {
        "whole": {"position": "*", "dtype": "bfloat16"},
        "decoded": {"position": "generated[*]", "dtype": "bfloat16"},
        "three": {"position": "generated[0:3]", "dtype": "int8"},
        "float": {"position": "*", "dtype": "float32"},
        "projected": {"position": "*", "reduce": {"project": str(folder / "m.npy")}},
    }
    return [
        ExtractionPoint(
            name=name,
            layers=tuple(range(LAYERS)),
            tensor_type="residual_stream",
            execution_mode="async",
            queue_depth=1024,
            **fields,
        )
        for name, fields in shapes.items()
    ]


def rows(folder: Path) -> str:
    """Values with a scale for each dimension, as a residual stream's."""
    rng = np.random.default_rng(2)
    scales = rng.lognormal(0, 0.2, (LAYERS, WIDTH))
    np.save(folder / "rows.npy", (rng.standard_normal((4096, LAYERS, WIDTH)) * scales).astype(np.float32))
    return str(folder / "rows.npy")


def serve(bench: EngineBench, served: Served, requests: int, seed: int) -> set[str]:
    """Send requests, each at its time, and wait for their ends; return their ids."""
    rng = random.Random(seed)
    due = time.monotonic()
    sent = set()
    for _ in range(requests):
        request_id = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        prompt = "".join(rng.choices(string.ascii_letters, k=served.prompt))
        sampling = Sampling(max_tokens=served.generated, ignore_eos=True)
        time.sleep(max(0.0, due - time.monotonic()))
        bench.send_request(PromptRequest(request_id=request_id, prompt=prompt, sampling=sampling, created_at_us=1))
        sent.add(request_id)
        due += rng.expovariate(1 / served.gap_s)
    bench.wait_finals(sent)
    return sent


def sizes(broker: Broker, bench: EngineBench) -> dict[str, int]:
    """Return the bytes of each point's log, without what is allocated ahead."""
    return {
        name: sum(
            path.stat().st_size
            for path in (broker.folder / "data").glob(f"{bench.plan.activations(name)}-[0-9]*/*.log")
        )
        for name in bench.plan.points
    }


def measured(bench: EngineBench, ids: set[str]) -> tuple[float, float]:
    """Return what the records of a topic say of how requests were served: seconds in all, and of a token."""
    found = [message for _, message in bench.messages(bench.plan.activations("decoded"))]
    mine = [message for message in found if getattr(message, "request_id", "") in ids]
    began = min(message.started_at_us for message in mine if isinstance(message, StreamStarted))
    ended = max(message.ended_at_us for message in mine if isinstance(message, StreamEnded))
    times: dict[str, list[int]] = {}
    for message in mine:
        if isinstance(message, ActivationBlock):
            times.setdefault(message.request_id, []).append(message.captured_at_us)
    token_us = np.mean([np.diff(sorted(each)).mean() for each in times.values()])
    return (ended - began) / 1e6, float(token_us) / 1000


@pytest.fixture(params=list(SERVED))
def run(request, apache_broker: Broker, tmp_path: Path):
    """Bytes of each activations topic, as planned and as found."""
    if not (apache_broker.folder / "data").is_dir():
        pytest.skip("Apache Kafka runs in a container: its log directories are not here")
    served, wanted = SERVED[request.param], points(tmp_path)
    settings = apache_broker.settings(**{"compression.type": served.codec})
    with EngineBench(settings, tmp_path, points=wanted, partitions=PARTITIONS) as bench:
        args = {
            "layers": LAYERS,
            "width": WIDTH,
            "step_s": served.step_s,
            "rows": rows(tmp_path),
            "max_model_len": 1024,
        }
        worker = bench.start_worker(
            bench.configure(engine={"kind": "fake", "args": args}, publisher={"interval_ms": served.interval_ms})
        )
        worker.wait_ready()
        # A broker that has just started takes several times as long for a drain.
        serve(bench, served, WARM_UP, seed=4)
        before = sizes(apache_broker, bench)
        ids = serve(bench, served, served.requests, seed=3)
        assert worker.terminate() == 0, worker.tail()
        found = {name: size - before[name] for name, size in sizes(apache_broker, bench).items()}
        taken_s, each_ms = measured(bench, ids)
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "dtype": "float32"})
    )
    asked = Asked(
        model=read_model(str(tmp_path)),
        spec=ProbeSpec(extraction_points=tuple(wanted)),
        traffic=Traffic(
            requests_per_s=served.requests / taken_s,
            tokens_per_s=served.requests * served.generated / taken_s,
            prompt_tokens=served.prompt,
            token_ms=each_ms,
        ),
        retention_s=3600,
        replication=1,
        partitions=PARTITIONS,
        partition_bytes_s=10 << 20,
        codec=served.codec,
        engines=1,
        disk_bytes=None,
        probes=None,
        measure=False,
        publisher=PublisherSection(interval_ms=served.interval_ms),
        delta_ms=50,
    )
    planned = {found.about: found.value * taken_s for found in figures(asked) if found.name == "bytes_per_s"}
    return planned, found


def test_planned_bytes_are_within_a_tenth_of_what_a_run_leaves_on_disk(run) -> None:
    planned, found = run
    off = {name: planned[f"activations.{name}"] / size - 1 for name, size in found.items()}
    assert min(found.values()) > 50_000
    assert max(map(abs, off.values())) < 0.1, (off, planned, found)
