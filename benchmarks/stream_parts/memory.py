"""Memory of worker, publisher and probe host while 10,000 requests open and close: the slope of each one's RSS.

A worker with the scripted engine (requests of 8 tokens, two layers of 64 x float32 captured at each), its publisher
and a host with a linear probe run on one Apache Kafka; requests are sent at a constant rate. RSS is read every second
of each process. The slope is that of the line through the samples after minute 2, least squares: before, caches fill,
and the pages of the ring are touched for the first time (it has 4 MiB here and goes round in that time). Then every
request must have its one final and its one result, or the part fails. `--seconds` and `--rounds` mean nothing here.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import psutil

from benchmarks.stream_parts import Aim, Options
from undercurrent.probes import LinearProbe
from undercurrent.protocol.messages import ProbeVerdict, VerdictKind
from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.brokers import Broker
from undercurrent.testing.engine_bench import EngineBench

AIMS = {"rss_mb_per_min": Aim("<", 1.0)}

REQUESTS = 10_000
WARM_S, MEASURED_S = 120.0, 120.0
WIDTH, TOKENS = 64, 8
MIB = 1 << 20


def measure(broker: Broker, options: Options) -> dict[str, float]:
    """Return the RSS slope of each process after minute 2, MiB per minute, and the steepest of them."""
    with tempfile.TemporaryDirectory() as name, EngineBench(broker.settings(), Path(name)) as bench:
        processes, host = _start(bench, Path(name))
        try:
            ids, samples = _send(bench, processes)
            _check(bench, ids)
        finally:
            host.close()
    times = np.array([at for at, _ in samples])
    late = times >= WARM_S
    slopes = {}
    for at, name in enumerate(processes):
        rss = np.array([sizes[at] for _, sizes in samples]) / MIB
        slope, _ = np.polyfit(times[late] / 60.0, rss[late], 1)
        slopes[f"rss_mb_per_min_{name}"] = float(slope)
        print(f"{name}: {rss[0]:.1f} MiB at first, {rss[late][0]:.1f} after {WARM_S:.0f} s, {rss[-1]:.1f} at last")
    return {"rss_mb_per_min": max(slopes.values()), **slopes}


def _start(bench: EngineBench, folder: Path) -> tuple[dict[str, psutil.Process], AppProcess]:
    weight = np.linspace(-1, 1, WIDTH, dtype=np.float32)
    probe = LinearProbe.from_arrays(weight, 0.0, layer=2, tensor_type="residual_stream", threshold=1e9, name="linear")
    probe.save(folder / "linear")
    engine = {"kind": "fake", "args": {"step_s": 0.01, "width": WIDTH}}
    worker = bench.start_worker(bench.configure(engine=engine, publisher={"ring_mib": 4}))
    config = bench.configure_host({"name": "linear", "point": "residual", "probe": "./linear"})
    host = AppProcess("probe_consumers", config, folder / "host.log")
    worker.wait_ready()
    publisher = worker.publisher
    assert publisher is not None
    return {"worker": psutil.Process(worker.pid), "publisher": publisher, "host": psutil.Process(host.pid)}, host


def _send(
    bench: EngineBench, processes: Mapping[str, psutil.Process]
) -> tuple[list[str], list[tuple[float, list[int]]]]:
    """Send the requests at a constant rate; return their ids, and seconds and RSS of each process once a second."""
    ids: list[str] = []
    samples: list[tuple[float, list[int]]] = []
    for seconds in _every_second(WARM_S + MEASURED_S):
        due = min(REQUESTS, round(REQUESTS * seconds / (WARM_S + MEASURED_S)))
        ids += bench.send(["prompt"] * (due - len(ids)), max_tokens=TOKENS)
        samples.append((seconds, [process.memory_info().rss for process in processes.values()]))
    ids += bench.send(["prompt"] * (REQUESTS - len(ids)), max_tokens=TOKENS)
    return ids, samples


def _every_second(total_s: float) -> Iterator[float]:
    began = time.monotonic()
    for at in range(int(total_s) + 1):
        time.sleep(max(0.0, began + at - time.monotonic()))
        yield time.monotonic() - began


def _check(bench: EngineBench, ids: list[str]) -> None:
    finals = bench.wait_finals(ids, 120.0)
    assert all(len(finals[request_id]) == 1 for request_id in ids)

    def results() -> list[str]:
        return [said.request_id for said in bench.said(ProbeVerdict) if said.kind is VerdictKind.RESULT]

    bench.wait(lambda: len(results()) >= len(ids), "a result for each request", 120.0)
    assert sorted(results()) == sorted(ids)
