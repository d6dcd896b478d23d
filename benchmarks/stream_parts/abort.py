"""An abort, from the capture of the token that asks for it to the engine's stop, while 64 requests run on real vLLM.

The whole ring: an engine worker with a Llama of random weights and its publisher, a probe host with a linear probe that
scores every generated token, the broker. The threshold is set on recorded rows of the same model so that one token in
`TOKENS_PER_ABORT` reaches it; each stopped request is followed by one that waits, so that 64 run all the time. Times
are those that the answers on `control.acks` carry, all by one clock: when the token's row was taken in the engine
(captured), appended by the broker (published, to the millisecond), judged (decided), when the worker read the command
and handed it to `engine.abort` (received), and when the engine had stopped (applied). `abort_ms` is from captured to
applied.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.stream_parts import Aim, Options
from undercurrent.codec import as_array
from undercurrent.probes import LinearProbe
from undercurrent.protocol.messages import AckOutcome, ActivationBlock, ControlAck, ProbeHeartbeat
from undercurrent.spec import ExtractionPoint
from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.brokers import Broker
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.worker_process import WorkerProcess

AIMS = {"abort_ms_p50": Aim("<", 25), "abort_ms_p99": Aim("<", 100)}

RUNNING, WIDTH, LAYER, MAX_LEN = 64, 256, 2, 2048
TOKENS_PER_ABORT = 400
# Enough that some wait to the end.
PROMPTS = 2000
WARM_UP_S = 5.0
START_S = 300.0
# One core for the model: threads of it that spin on every core hold up all who publish, judge and stop, for seconds.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
}
STAGES = ("published", "decided", "received", "applied")


class Ring:
    """A worker and a probe host on topics of their own.

    Args:
        bench: the topics.
        folder: for models, probes and logs.
        seed: of the probe's direction.
    """

    def __init__(self, bench: EngineBench, folder: Path, seed: int) -> None:
        # Imported here: the other parts need no torch.
        from undercurrent.testing.tiny_models import build_tiny_model

        self.bench, self._folder = bench, folder
        self._weight = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
        model = build_tiny_model("llama", folder / "model", width=WIDTH, max_len=MAX_LEN)
        args = {"max_model_len": MAX_LEN, "max_num_seqs": RUNNING, "dtype": "float32", "enable_prefix_caching": False}
        engine = {"kind": "vllm", "model": str(model), "args": args}
        config = bench.configure(engine=engine, limits={"max_in_flight": RUNNING})
        self.worker: WorkerProcess = bench.start_worker(config, ENVIRONMENT)
        self.worker.wait_ready(START_S)
        self.host: AppProcess | None = None

    def start_host(self) -> None:
        """Start a host whose probe acts on one token in `TOKENS_PER_ABORT`."""
        threshold = float(np.quantile(self._scores(), 1 - 1 / TOKENS_PER_ABORT))
        LinearProbe.from_arrays(
            self._weight, 0.0, layer=LAYER, tensor_type="residual_stream", threshold=threshold, name="guard"
        ).save(self._folder / "guard")
        binding = {"name": "guard", "point": "residual", "probe": "./guard", "mode": "abort"}
        config = self.bench.configure_host(binding, **{"from": "latest"})
        self.host = AppProcess("probe_consumers", config, self._folder / "host.log")
        self.bench.wait(lambda: any(beat.partitions for beat in self.bench.said(ProbeHeartbeat)), "a host that reads")

    def send(self, count: int, tokens: int) -> list[str]:
        """Send prompts that go on for so many tokens."""
        texts = [f"request {number} goes on and on" for number in range(count)]
        return self.bench.send(texts, max_tokens=tokens, temperature=1.0, ignore_eos=True)

    def gauge(self, name: str) -> float:
        """Return a metric of the worker."""
        lines = self.worker.get("/metrics")[1].splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"undercurrent_{name} "))

    def processes(self) -> dict[str, psutil.Process]:
        """Return the processes of the ring by what they are."""
        worker = psutil.Process(self.worker.pid)
        found = {"worker": worker}
        for child in worker.children(recursive=True):
            line = " ".join(child.cmdline())
            name = "publisher" if "engine_worker.publisher" in line else "engine" if "EngineCore" in line else ""
            found |= {name: child} if name else {}
        return found if self.host is None else {**found, "host": psutil.Process(self.host.pid)}

    def close(self) -> None:
        """End the host; the worker is the bench's."""
        if self.host is not None:
            self.host.close()

    def _scores(self) -> NDArray[np.float32]:
        """Return what the probe gives the tokens of some requests that run to their end."""
        ids = self.send(16, 256)
        self.bench.wait_finals(ids, 180)
        records = (message for messages in self.bench.activations().values() for message in messages)
        rows = [as_array(one)[:, 0] for one in records if isinstance(one, ActivationBlock)]
        return np.concatenate(rows).astype(np.float32) @ self._weight


@contextmanager
def ring(broker: Broker, seed: int) -> Iterator[Ring]:
    """Start a ring, and end it."""
    point = ExtractionPoint(
        "residual", LAYER, "residual_stream", "generated[*]", execution_mode="async", queue_depth=4096
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineBench(broker.settings(), Path(folder), points=[point]) as bench,
    ):
        made = Ring(bench, Path(folder), seed)
        try:
            made.start_host()
            yield made
        finally:
            made.close()


def times_ms(acks: list[ControlAck]) -> dict[str, NDArray[np.float64]]:
    """Return, by stage, the milliseconds from the capture."""
    found = {}
    for stage in STAGES:
        pairs = [(ack.captured_at_us, getattr(ack, f"{stage}_at_us")) for ack in acks]
        found[stage] = np.array([(at - begin) / 1000 for begin, at in pairs if begin is not None and at is not None])
    return found


def watch(made: Ring, seconds: float) -> dict[str, float]:
    """Let the ring run; return what ran meanwhile and what it took of the processors."""
    processes = made.processes()
    spent = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    tokens, began, running = made.gauge("engine_tokens_total"), time.monotonic(), []
    while (now := time.monotonic()) < began + seconds:
        running.append(made.gauge("engine_requests_running"))
        time.sleep(min(0.5, max(0.0, began + seconds - now)))
    took = time.monotonic() - began
    cores = {f"cores_{name}": (sum(p.cpu_times()[:2]) - spent[name]) / took for name, p in processes.items()}
    rate = (made.gauge("engine_tokens_total") - tokens) / took
    return {"running": float(np.median(running)), "tokens_per_s": rate, **cores}


def told(times: Mapping[str, NDArray[np.float64]]) -> None:
    """Print the stages."""
    for stage, values in times.items():
        p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
        print(f"captured -> {stage:9} p50 {p50:6.1f}  p90 {p90:6.1f}  p99 {p99:6.1f}  most {values.max():6.1f} ms")


def measure(broker: Broker, options: Options) -> dict[str, float]:
    """Return `abort_ms_p50` and `abort_ms_p99`, and the medians of the stages before."""
    with ring(broker, options.seed) as made:
        made.send(PROMPTS, MAX_LEN - 64)
        made.bench.wait(lambda: made.gauge("engine_requests_running") >= RUNNING, "64 requests", 120)
        time.sleep(WARM_UP_S)
        from_us = time.time_ns() // 1000
        seen = watch(made, options.seconds * options.rounds)
        print(", ".join(f"{name} {value:,.2f}" for name, value in seen.items()), flush=True)
        acks = [ack for found in made.bench.acks().values() for ack in found]
        mine = [ack for ack in acks if ack.outcome is AckOutcome.APPLIED and (ack.captured_at_us or 0) >= from_us]
    times = times_ms(mine)
    print(f"{len(mine)} aborts")
    told(times)
    medians = {f"abort_ms_{stage}_p50": float(np.median(values)) for stage, values in times.items()}
    p50, p99 = np.quantile(times["applied"], [0.5, 0.99])
    return {"abort_ms_p50": float(p50), "abort_ms_p99": float(p99), **medians, "abort_running": seen["running"]}
