"""The processes of the benchmark as it sees them: engines, what a publisher reports, readers, and their CPU time."""

from __future__ import annotations

import _thread
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import psutil

from undercurrent.capture.ring import Ring

RING_BYTES = 64 << 20


class Task(TypedDict, total=False):
    """What a visit is, beside its length: clocks around the taps, requests at once, whether any of them is captured."""

    time_taps: bool
    concurrency: int
    captured: bool


class EngineProcess:
    """An engine child; it is stopped unless it is visited."""

    def __init__(self, model: Path, layers: list[int] | None) -> None:
        self.ring = Ring.create(RING_BYTES) if layers else None
        settings = {"model": str(model), "ring": self.ring.path if self.ring else None, "layers": layers}
        command = [sys.executable, "-m", "benchmarks.overhead.load", json.dumps(settings)]
        # The clock around the taps is a function, which vLLM takes from its own driver only when it is told to.
        environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.versions = self._answer()["versions"]
        self.sleep()

    def visit(self, seconds: float, number: int, **task: Unpack[Task]) -> dict[str, Any]:
        """Wake it, let it work, and count."""
        self._signal("resume")
        before = self.ring.stats() if self.ring else None
        usual = {"time_taps": False, "concurrency": 16, "captured": True}
        whole = {"seconds": seconds, "round": number, "tokens": 64, **usual, **task}
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(whole) + "\n")
        self.child.stdin.flush()
        answer = self._answer()
        if self.ring and before:
            after = self.ring.stats()
            answer["steps"] = after.steps - before.steps
            answer["capture_us"] = (after.capture_ns - before.capture_ns) / 1000
            answer["dropped"] = after.dropped_rows - before.dropped_rows
        return answer

    def sleep(self) -> None:
        """Stop every process of it."""
        self._signal("suspend")

    def close(self) -> None:
        """End it."""
        self._signal("resume")
        assert self.child.stdin is not None
        self.child.stdin.close()
        try:
            self.child.wait(60)
        except subprocess.TimeoutExpired:
            for process in [*psutil.Process(self.child.pid).children(recursive=True), self.child]:
                process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        while line := self.child.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit("an engine died; its log is above")

    def _signal(self, method: str) -> None:
        root = psutil.Process(self.child.pid)
        for process in [root, *root.children(recursive=True)]:
            getattr(process, method)()


@dataclass
class Heard:
    """What a publisher said during one visit."""

    ended: int = 0
    records: int = 0
    last_ended_s: float = 0.0
    ack_s: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on_report(self, report: dict[str, Any]) -> None:
        """Add one report."""
        with self.lock:
            self.ended += len(report["ended"])
            self.records += sum(counts["records"] for counts in report["counts"].values())
            self.ack_s += report["ack_s"]
            self.publish_s += report["publish_s"]
            if report["ended"]:
                self.last_ended_s = time.monotonic()

    def on_publisher_gone(self, error: BaseException) -> None:
        """End the benchmark: a publisher died. Whatever the main thread waits for, its engines are closed."""
        print(error, file=sys.stderr, flush=True)
        _thread.interrupt_main()


class Reader:
    """A reader process that ends when its standard input does."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class Meter:
    """CPU seconds of publisher and broker since it was made."""

    def __init__(self, publisher: int | None, broker: int | None) -> None:
        self._processes = {"publisher": psutil.Process(publisher), "broker": psutil.Process(broker)}
        self._before = self._now()

    def read(self) -> dict[str, float]:
        """Return the seconds."""
        return {name: value - self._before[name] for name, value in self._now().items()}

    def _now(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}
