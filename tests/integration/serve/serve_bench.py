"""A bare vLLM server with capture on topics of its own, asked by the official client."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import openai
import psutil
import yaml

from undercurrent.adapters.vllm.server_settings import server_config
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.probes import LinearProbe
from undercurrent.protocol.messages import (
    ActivationBlock,
    ControlAck,
    ProbeVerdict,
    StreamEnded,
    StreamStarted,
    VerdictKind,
)
from undercurrent.service.processes import tied_command
from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.canaries import CANARIES, CANARY_ENVIRONMENT, canary_section
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.servers import free_port
from undercurrent.testing.waiting import wait_until

WIDTH, LAYER = 64, 2
MODEL = "tiny"
START_S = 240
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HERE = Path(__file__).parent
ENVIRONMENT = {
    **CANARY_ENVIRONMENT,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}


class Server:
    """A server process; it dies with the thread that started it.

    Args:
        command: what runs it, before its arguments.
        arguments: of vLLM, but for the address.
        log: gets what it prints; its processes are told apart by it.
    """

    def __init__(self, command: Sequence[str], arguments: Sequence[str], log: Path) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                tied_command([sys.executable, *command, *arguments, "--host", "127.0.0.1", "--port", str(self.port)]),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "SERVER_LOG": str(log)},
            )

    def wait_ready(self) -> Server:
        def ready() -> bool:
            assert self._process.poll() is None, f"the server has ended:\n{self.tail(120)}"
            try:
                return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(ready, START_S, f"the server to be ready; its log: {self.log}", every_s=0.5)
        return self

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def family(self) -> list[psutil.Process]:
        """Return the server's processes, the first one included."""
        first = psutil.Process(self._process.pid)
        found = [first, *first.children(recursive=True)]
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]

    def api_servers(self) -> list[psutil.Process]:
        """Return its API-server processes, by number."""
        named = [(" ".join(process.cmdline()), process) for process in self.family()]
        return [process for title, process in sorted(named, key=lambda n: n[0]) if "APIServer_" in title]

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def terminate(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        for process in [*psutil.Process(self._process.pid).children(recursive=True)] if self.running else []:
            process.kill()
        if self.running:
            self._process.kill()
            self._process.wait(30)


class ServeBench(EngineBench):
    """Topics for three points, `residual`, `mlp` and `last`, a server, and hosts that judge the first two.

    Args:
        settings: the connection.
        folder: for files.
        model: folder of the model.
    """

    def __init__(self, settings: KafkaSettings, folder: Path, model: Path) -> None:
        super().__init__(settings, folder, partitions=2, layers=(LAYER,))
        self.plan = dataclasses.replace(self.plan, points=("residual", "mlp", "last"))
        TopicAdmin(settings).apply(self.plan)
        points = yaml.safe_load((folder / "points.yaml").read_text())
        residual = points["extraction_points"][0]
        points["extraction_points"].append({**residual, "name": "mlp", "tensor_type": "mlp_out"})
        points["extraction_points"].append({**residual, "name": "last", "position": "generated[-1]"})
        self._write_yaml("points.yaml", points)
        self.model = model
        self._hosts: list[AppProcess] = []
        self.began_s = time.time()
        self.servers: list[Server] = []

    def __exit__(self, *_: object) -> None:
        for process in [*self._hosts, *self.servers]:
            process.close()
        super().__exit__()

    def _shared(self) -> dict[str, Any]:
        return {
            "kafka": canary_section(self.settings, self.folder),
            "topics": {
                "prefix": self.plan.prefix,
                "prompt_partitions": self.plan.prompt_partitions,
                "activation_partitions": self.plan.activation_partitions,
                "verdict_partitions": self.plan.verdict_partitions,
            },
            "points": "points.yaml",
        }

    def capture_file(self, sections: Mapping[str, Any] | None = None, **capture: Any) -> Path:
        self.metrics_port = free_port()
        own = {"capture": {"check_plans": True, **capture}, "metrics": {"port": self.metrics_port}}
        return self.configure_server(**self._shared(), **own, **(sections or {}))

    def serve(self, command: Sequence[str], capture: Path, *arguments: str) -> Server:
        given = [
            "--model", str(self.model), "--served-model-name", MODEL, "--dtype", "float32",
            "--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--block-size", "32",
            "--chat-template", CHAT_TEMPLATE, "--enforce-eager", "--no-async-scheduling", "--no-enable-prefix-caching",
            "--additional-config", json.dumps({"undercurrent": {"settings": str(capture)}}),
            "--middleware", "engine_worker.middleware.ControlMiddleware",
        ]  # fmt: skip
        self.servers.append(Server(command, [*given, *arguments], self.folder / f"server-{len(self.servers)}.log"))
        return self.servers[-1]

    def start_host(self) -> AppProcess:
        """Start a probe host that stops every stream of `mlp` at its first row, and scores those of `residual`."""
        for name, tensor_type, threshold in (("loud", "mlp_out", -1.0), ("quiet", "residual_stream", 1e9)):
            LinearProbe.from_arrays(
                [0.5] * WIDTH, 0.0, layer=LAYER, tensor_type=tensor_type, threshold=threshold, name=name
            ).save(self.folder / name)
        path = self._write_yaml(
            "host.yaml",
            {
                **self._shared(),
                "service": {"name": "probes"},
                "from": "earliest",
                "bindings": [
                    {"name": "loud", "point": "mlp", "probe": "./loud", "mode": "abort"},
                    {"name": "quiet", "point": "residual", "probe": "./quiet", "mode": "flag"},
                ],
            },
        )
        self._hosts.append(AppProcess("probe_consumers", path, self.folder / "host.log", CANARY_ENVIRONMENT))
        return self._hosts[-1]

    def streams(self, point: str = "residual") -> dict[tuple[str, int, int], list[Any]]:
        """Return the messages of each stream (request, attempt, index) of a point, in log order."""
        found: dict[tuple[str, int, int], list[Any]] = {}
        for _, message in self.messages(self.plan.activations(point)):
            if isinstance(message, StreamStarted | ActivationBlock | StreamEnded):
                found.setdefault((message.request_id, message.attempt, message.index), []).append(message)
        return found

    def stream(self, answer_id: str, point: str = "residual") -> list[Any]:
        """Wait until the stream of an answered request has ended; return its messages."""

        def ended() -> list[Any] | None:
            for (request_id, _, _), messages in self.streams(point).items():
                if request_id.startswith(answer_id) and isinstance(messages[-1], StreamEnded):
                    return messages
            return None

        return self.wait(ended, f"the end of {answer_id} at {point}")

    def results(self) -> dict[str, ProbeVerdict]:
        """Return the last word of the quiet probe on each request."""
        topic = self.plan.verdicts
        with AssignedReader(self.settings, {(topic, 0): 0}, isolation=Isolation.READ_COMMITTED) as reader:
            found = [self.codec.decode(record.value) for record in reader.read_to_end(30.0)]
        said = [message for message in found if isinstance(message, ProbeVerdict)]
        return {v.request_id: v for v in said if v.probe == "quiet" and v.kind is VerdictKind.RESULT}

    def publisher(self) -> psutil.Process:
        """Return the publisher process of this server's only worker, wherever it lives."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                ours = "engine_worker.sidecar" in process.cmdline() and str(self.folder) in str(process.environ())
                found += [process] if ours else []
        (one,) = found
        return one

    def page(self, path: str) -> str:
        """Return what the publisher serves under a path."""
        return httpx.get(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=10.0).text

    def metric(self, name: str) -> float:
        """Return what the publisher says of itself, 0 for a line that it does not have."""
        lines = self.page("/metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def acks_of(self, request_id: str) -> list[ControlAck]:
        return [ack for acks in self.acks().values() for ack in acks if ack.request_id == request_id]

    def host_processes(self) -> list[psutil.Process]:
        return [psutil.Process(host.pid) for host in self._hosts]

    def log_texts(self) -> dict[str, str]:
        """Return everything that the server, its publishers and the hosts have printed, whole."""
        return {str(p.log): p.log.read_text(errors="replace") for p in [*self.servers, *self._hosts]}

    def capture_secrets(self) -> tuple[object, ...]:
        """Return the secrets that the server's settings hold, as it reads them."""
        with patch.dict(os.environ, CANARY_ENVIRONMENT):
            options = server_config(self.folder / "capture.yaml").kafka.options
        return tuple(options[key] for key in CANARIES)

    def logs(self) -> str:
        return "\n".join(f"--- {process.log}\n{process.tail()}" for process in [*self.servers, *self._hosts])


def client_of(server: Server) -> openai.OpenAI:
    """Return a client with a connection of its own: the kernel then chooses an API server anew."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0)


def complete(server: Server, prompt: str | list[int], **more: Any) -> Any:
    values = {"model": MODEL, "temperature": 0, "max_tokens": 16, **more}
    with client_of(server) as client:
        return client.completions.create(prompt=prompt, **values)


def ordered(**order: Any) -> dict[str, Any]:
    return {"vllm_xargs": {"undercurrent": json.dumps(order)}}
