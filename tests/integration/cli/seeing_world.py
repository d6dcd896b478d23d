"""A pipeline on which something of everything has happened, for the commands that look at it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from undercurrent.kafka.settings import KafkaSettings
from undercurrent.probes import LinearProbe
from undercurrent.protocol.messages import (
    BindingMode,
    ProbeHeartbeat,
    ProbeVerdict,
    PromptRequest,
    Sampling,
    VerdictAction,
    VerdictKind,
)
from undercurrent.spec import ExecutionMode, ExtractionPoint, TensorType, parse_position
from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.engine_bench import EngineBench

TIMEOUT_S = 120
WIDTH = 16


def point(name: str) -> ExtractionPoint:
    return ExtractionPoint(
        name,
        (2,),
        TensorType.RESIDUAL_STREAM,
        parse_position("*"),
        execution_mode=ExecutionMode.ASYNC,
        queue_depth=1024,
    )


class SeeingWorld:
    """Engine worker, probe host, and requests that ended in every way.

    Two points: a quiet probe guards the first one, and one that stops whatever it sees reads the second. A request
    names the points that it wants.
    """

    def __init__(self, settings: KafkaSettings, folder: Path) -> None:
        self.folder = folder
        self.bench = EngineBench(settings, folder, partitions=2, points=[point("residual"), point("danger")])
        self._save("quiet", 1e9)
        self._save("loud", 0.0)
        self.config = self.bench.configure(
            engine={"kind": "fake", "args": {"step_s": 0.005, "max_model_len": 4096}},
            guards={"probes": ["quiet"], "wait_s": 10.0},
        )
        host = self.bench.configure_host(
            {"name": "quiet", "point": "residual", "probe": "./quiet"},
            {"name": "loud", "point": "danger", "probe": "./loud", "mode": "abort"},
        )
        self.host = AppProcess("probe_consumers", host, folder / "host.log")
        self.worker = self.bench.start_worker(self.config)
        self.ids: dict[str, str] = {}

    def close(self) -> None:
        self.host.close()
        self.bench.__exit__()

    def _save(self, name: str, threshold: float) -> None:
        weight = np.linspace(-1, 1, WIDTH, dtype=np.float32)
        bias = 0.0 if name == "quiet" else 1e3
        LinearProbe.from_arrays(
            weight, bias, layer=2, tensor_type="residual_stream", threshold=threshold, name=name
        ).save(self.folder / name)

    def happen(self) -> None:
        """Let everything happen, and wait until all of it is over."""
        bench = self.bench
        self.worker.wait_ready()
        bench.wait(lambda: any(beat.partitions for beat in bench.said(ProbeHeartbeat)), "a host that reads", TIMEOUT_S)
        self.ids = {
            "completed": self._send("a plain request", max_tokens=48),
            "aborted": self._send("a dangerous one", points=("residual", "danger"), max_tokens=3000),
            "children": self._send("three at once", max_tokens=8, n=3),
        }
        same = PromptRequest(
            request_id="twice", prompt="p", points=("residual",), sampling=Sampling(max_tokens=4), created_at_us=0
        )
        for request in (same, same):
            bench.send_request(request)
        self.ids |= {"twice": "twice", "failed": self._send("x", points=("nowhere",)), "poison": "poison"}
        bench.send_bytes(b"poison", b"\x00not avro")
        bench.send_bytes(None, b"no key", partition=0)
        bench.write(bench.plan.activations("residual"), 1, b"stray", b"rubbish")
        bench.wait_finals(self.ids.values(), TIMEOUT_S)
        bench.wait(self._all_said, "verdicts, answers and dead letters", TIMEOUT_S)

    def _send(self, prompt: str, *, points: tuple[str, ...] = ("residual",), **sampling: Any) -> str:
        request_id = f"r-{uuid.uuid4().hex[:8]}"
        self.bench.send_request(
            PromptRequest(
                request_id=request_id, prompt=prompt, points=points, sampling=Sampling(**sampling), created_at_us=0
            )
        )
        return request_id

    def _all_said(self) -> bool:
        return not self.bench.audit() and len(self.letters()) >= 4

    def letters(self) -> list[tuple[str, str]]:
        """Topic without the prefix, and cause, of every dead letter."""
        plan = self.bench.plan
        topics = [plan.prompts, *(plan.activations(name) for name in plan.points)]
        return [
            (topic.removeprefix(f"{plan.prefix}."), dict(record.headers)["undercurrent.cause"].decode())
            for topic in topics
            for record in self.bench.read(plan.dlq(topic))
            if "undercurrent.cause" in dict(record.headers)
        ]

    def unwanted_verdict(self) -> None:
        """Write a second result of a probe on a stream, as no probe host does."""
        bench = self.bench
        request_id = self.ids["completed"]
        known = next(v for v in bench.said(ProbeVerdict) if v.request_id == request_id)
        verdict = ProbeVerdict(
            request_id=request_id,
            attempt=known.attempt,
            point="residual",
            probe="quiet",
            service=known.service,
            kind=VerdictKind.RESULT,
            mode=BindingMode.SHADOW,
            action=VerdictAction.CONTINUE,
            source_partition=0,
            source_offset=1,
            decided_at_us=0,
        )
        bench.write(bench.plan.verdicts, 0, request_id.encode(), bench.codec.encode(verdict))

    # --- the commands, each as the process that a user starts

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command; return what it writes."""
        done = self.start(*arguments)
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 or done.stdout else done.stderr

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "undercurrent.cli", *arguments, "--config", str(self.looking_config())]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env={**os.environ, "TERM": "dumb"}
        )

    def lines(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run(*arguments, "--json", code=code).splitlines()]

    def looking_config(self) -> Path:
        """What somebody needs who only looks: the address and the prefix."""
        path = self.folder / "look.yaml"
        path.write_text(
            yaml.safe_dump({"kafka": self.bench.settings.keys(), "topics": {"prefix": self.bench.plan.prefix}})
        )
        return path
