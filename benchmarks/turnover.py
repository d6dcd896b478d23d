"""An engine worker comes or goes every few seconds while requests run for longer than that: what it costs.

    python -m benchmarks.turnover [--seconds 60] [--every 5] [--generation 30]

One scripted worker stays; another one joins its group, leaves it, joins again, and hands its requests over each time.
Prints how often requests were begun anew and why; exit code 1 where one has not exactly one complete final.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

from undercurrent.protocol.messages import Outcome
from undercurrent.testing.brokers import apache_kafka
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.fake_engine import generated_text
from undercurrent.testing.worker_process import WorkerProcess

STEP_S = 0.02
REQUESTS = 12
LIMITS = {"handover_s": 0.5, "shutdown_s": 0.5}


def restarts(worker: WorkerProcess) -> dict[str, float]:
    """Return how often a worker began requests anew, by cause."""
    found = re.findall(r'undercurrent_engine_restarts_total\{cause="(\w+)"\} (\S+)', worker.get("/metrics")[1])
    return {cause: float(value) for cause, value in found}


def turn(bench: EngineBench, seconds: float, every_s: float) -> int:
    """Let a second worker come and go for so long; return how many times it came."""
    config = bench.configure("engine-1", engine={"kind": "fake", "args": {"step_s": STEP_S}}, limits=LIMITS)
    until_s, came = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        worker = bench.start_worker(config)
        came += 1
        time.sleep(every_s)
        worker.terminate(60)
        time.sleep(every_s)
    return came


def main() -> int:
    """Run once and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--generation", type=float, default=30.0)
    given = parser.parse_args()
    tokens = int(given.generation / STEP_S)
    with (
        tempfile.TemporaryDirectory() as folder,
        apache_kafka() as broker,
        EngineBench(broker.settings(), Path(folder), partitions=4) as bench,
    ):
        engine = {"kind": "fake", "args": {"step_s": STEP_S}}
        stays = bench.start_worker(bench.configure("engine-0", engine=engine, limits=LIMITS))
        stays.wait_ready()
        ids = bench.send(["long"] * REQUESTS, max_tokens=tokens)
        came, began_s = turn(bench, given.seconds, given.every), time.monotonic()
        finals = bench.wait_finals(ids, 10 * given.generation)
        took_s, texts, counted = time.monotonic() - began_s, bench.texts(), restarts(stays)
        attempts = [len(claims) for claims in bench.starts().values()]
    whole = [
        [final.outcome for final in finals[name]] == [Outcome.COMPLETED] and texts[name] == generated_text(name, tokens)
        for name in ids
    ]
    print(f"a worker came {came} times and left after {given.every:g} s, {REQUESTS} requests of {given.generation:g} s")
    print(f"complete, with the text that they have undisturbed: {sum(whole)}; {took_s:.0f} s after the last change")
    print(f"attempts: {sum(attempts)}, at most {max(attempts)} of one request; begun anew where one stays: {counted}")
    return 0 if all(whole) else 1


if __name__ == "__main__":
    sys.exit(main())
