"""A pipeline's topics with engine workers on them: send prompts and commands, kill workers, read what the logs say.

    with EngineBench(broker.settings(), tmp_path) as bench:
        worker = bench.start_worker(bench.configure())           # the scripted engine; any other by engine={...}
        worker.wait_ready()
        ids = bench.send([f"prompt {i}" for i in range(8)], max_tokens=32)
        finals = bench.wait_finals(ids)

Every answer comes from the topics alone, read anew each time, so a worker's death loses nothing that a test knows.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from undercurrent import subjects
from undercurrent.insight.hearing import audit_records
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import Assignor, Isolation
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Record
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.audit import Finding
from undercurrent.protocol.generations import GenerationsReader, Ruling
from undercurrent.protocol.messages import (
    Accepted,
    CommandKind,
    CommandSource,
    ControlAck,
    ControlCommand,
    GenerationEvent,
    Message,
    PromptRequest,
    Released,
    Sampling,
)
from undercurrent.spec import ExecutionMode, ExtractionPoint, TensorType, parse_position
from undercurrent.spec.dump import extraction_point_to_dict
from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.servers import free_port
from undercurrent.testing.waiting import wait_until
from undercurrent.testing.worker_process import WorkerProcess
from undercurrent.topics import TopicPlan, partition_of

T = TypeVar("T")

_READ_S = 30.0


class EngineBench:
    """Topics of a pipeline, one point of it by default, and the workers that run its prompts.

    Args:
        settings: the connection.
        folder: for configuration and logs.
        assignor: of the workers' group.
        partitions: of prompts and of activations.
        layers: that the point names.
        points: of the pipeline instead of that one; none captures nothing.
        copies: of each partition, on as many brokers.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        folder: Path,
        *,
        assignor: Assignor = Assignor.COOPERATIVE_STICKY,
        partitions: int = 2,
        layers: Sequence[int] = (0, 2),
        points: Sequence[ExtractionPoint] | None = None,
        copies: int = 1,
    ) -> None:
        self.settings = settings
        self.folder = folder
        if points is None:
            points = (
                ExtractionPoint(
                    "residual",
                    tuple(layers),
                    TensorType.RESIDUAL_STREAM,
                    parse_position("*"),
                    execution_mode=ExecutionMode.ASYNC,
                    queue_depth=1024,
                ),
            )
        self.plan = TopicPlan(
            prefix=f"t{uuid.uuid4().hex[:10]}",
            points=tuple(point.name for point in points),
            prompt_partitions=partitions,
            activation_partitions=partitions,
            verdict_partitions=1,
            replication_factor=copies,
        )
        self.codec = subjects.codec_of(settings, self.plan)
        self._assignor = assignor
        self._publisher = Publisher(settings)
        self._lookup = OffsetLookup(settings)
        self._workers: list[WorkerProcess] = []
        self._hosts: list[AppProcess] = []
        TopicAdmin(settings).apply(self.plan)
        subjects.apply(settings, self.plan)
        specs = [extraction_point_to_dict(point) for point in points]
        self._write_yaml("points.yaml", {"version": 1, "extraction_points": specs})
        self._points = bool(points)

    def __enter__(self) -> EngineBench:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._workers, *self._hosts):
            process.close()
        self._publisher.close()

    # --- what is under test

    def configure(self, name: str = "engine-0", *, engine: Mapping[str, Any] | None = None, **sections: Any) -> Path:  # noqa: ANN401
        """Write a worker's configuration.

        Args:
            name: of its engine.
            engine: the engine's section; the scripted engine when not given.
            **sections: further sections.
        """
        fake = {"kind": "fake", "args": {"step_s": 0.005}}
        shared = {
            **self._connected(),
            **({"points": "points.yaml"} if self._points else {}),
            "engine": {"name": name, **(fake if engine is None else engine)},
            "group": {"name": "engine", "assignor": str(self._assignor)},
        }
        return self._write_yaml(f"{name}.yaml", {**shared, **sections})

    def configure_host(self, *bindings: Mapping[str, Any], **sections: Any) -> Path:  # noqa: ANN401
        """Write a probe host's configuration, which reads every topic from its start.

        Args:
            *bindings: as the file has them.
            **sections: further sections.
        """
        shared = {"points": "points.yaml", "service": {"name": "probes"}, "from": "earliest"}
        return self._write_yaml("host.yaml", {**self._connected(), **shared, "bindings": list(bindings), **sections})

    def configure_server(self, name: str = "chat-0", **sections: Any) -> Path:  # noqa: ANN401
        """Write the configuration of a bare vLLM server.

        Args:
            name: of its engine.
            **sections: further sections.
        """
        shared = {**self._connected(), "points": "points.yaml", "engine": {"name": name}}
        return self._write_yaml("capture.yaml", {**shared, **sections})

    def _connected(self) -> dict[str, Any]:
        return {
            "kafka": self.settings.keys(),
            "topics": {
                "prefix": self.plan.prefix,
                "prompt_partitions": self.plan.prompt_partitions,
                "activation_partitions": self.plan.activation_partitions,
                "verdict_partitions": self.plan.verdict_partitions,
            },
        }

    def start_worker(
        self, config: Path, environment: Mapping[str, str] | None = None, options: Sequence[str] = ()
    ) -> WorkerProcess:
        """Start a worker; its health server gets a free port."""
        port = free_port()
        ported = {**(environment or {}), "UNDERCURRENT_METRICS__PORT": str(port)}
        worker = WorkerProcess(config, self.folder / f"worker-{len(self._workers)}.log", port, ported, options)
        self._workers.append(worker)
        return worker

    def start_host(self, config: Path) -> AppProcess:
        """Start a probe host."""
        host = AppProcess("probe_consumers", config, self.folder / f"host-{len(self._hosts)}.log")
        self._hosts.append(host)
        return host

    # --- what it is given

    def send(self, prompts: Sequence[str], *, prefix: str = "r", **sampling: Any) -> list[str]:  # noqa: ANN401
        """Send prompts; return their request ids, in order."""
        ids = [f"{prefix}-{uuid.uuid4().hex[:8]}" for _ in prompts]
        wanted = Sampling(**sampling)
        self.send_requests(
            PromptRequest(request_id=request_id, prompt=prompt, sampling=wanted, created_at_us=_now_us())
            for request_id, prompt in zip(ids, prompts, strict=True)
        )
        return ids

    def send_requests(self, requests: Iterable[PromptRequest], timeout_s: float = _READ_S) -> None:
        """Send prompts and wait until all are acknowledged."""
        for request in requests:
            number = partition_of(request.request_id, self.plan.prompt_partitions)
            value = self.codec.encode(request)
            self._publisher.produce(self.plan.prompts, value, key=request.request_id.encode(), partition=number)
        left = self._publisher.flush(timeout_s)
        if left:
            raise AssertionError(f"{left} prompts are not acknowledged")

    def send_request(self, request: PromptRequest) -> int:
        """Send a prompt; return its offset."""
        return self.send_bytes(request.request_id.encode(), self.codec.encode(request))

    def send_bytes(self, key: bytes | None, value: bytes | None, *, partition: int | None = None) -> int:
        """Send a record to the prompts topic; return its offset."""
        number = partition
        if number is None:
            number = partition_of((key or b"").decode(), self.plan.prompt_partitions)
        return self.write(self.plan.prompts, number, key, value)

    def abort(self, request_id: str, *, attempt: int | None = None, probe: str | None = None) -> str:
        """Command an abort, as an operator or, with an attempt, as a probe; return the command's id."""
        command_id = uuid.uuid4().hex
        command = ControlCommand(
            command_id=command_id,
            kind=CommandKind.ABORT,
            request_id=request_id,
            attempt=attempt,
            source=CommandSource.OPERATOR if attempt is None else CommandSource.PROBE,
            probe=probe,
            reason="test",
            captured_at_us=_now_us() - 3000,
            published_at_us=_now_us() - 2000,
            decided_at_us=_now_us() - 1000,
            issued_at_us=_now_us(),
        )
        self.write(self.plan.control, 0, request_id.encode(), self.codec.encode(command))
        return command_id

    def write(self, topic: str, partition: int, key: bytes | None, value: bytes | None) -> int:
        """Write a record; return its offset once it is acknowledged."""
        offsets: list[int] = []
        error = self._publisher.produce(
            topic, value, key=key, partition=partition, on_delivery=lambda delivery: offsets.append(delivery.offset)
        )
        if error is not None:
            raise AssertionError(error.reason)
        wait_until(lambda: self._publisher.poll(0.05) >= 0 and bool(offsets), _READ_S, f"a record of {topic}")
        return offsets[0]

    # --- what the logs say

    def read(self, topic: str) -> list[Record]:
        """Return every record of a topic, but those of transactions that were not committed."""
        count = next(planned.partitions for planned in self.plan.topics() if planned.name == topic)
        starts = {(topic, number): 0 for number in range(count)}
        with AssignedReader(self.settings, starts, isolation=Isolation.READ_COMMITTED, lookup=self._lookup) as reader:
            return list(reader.read_to_end(_READ_S))

    def said(self, kind: type[T]) -> list[T]:
        """Return the committed messages of a kind on the verdicts topic."""
        found = [self.codec.decode(record.value) for record in self.read(self.plan.verdicts)]
        return [message for message in found if isinstance(message, kind)]

    def messages(self, topic: str) -> list[tuple[Record, Message]]:
        """Return every record of a topic with its message."""
        return [(record, self.codec.decode(record.value)) for record in self.read(topic)]

    def judged(self) -> list[tuple[Ruling, Accepted | Released | GenerationEvent]]:
        """Return the generations, each with what the reader rule says of it; in order within a request."""
        reader = GenerationsReader()
        found: list[tuple[Ruling, Accepted | Released | GenerationEvent]] = []
        for record, message in self.messages(self.plan.generations):
            if isinstance(message, Accepted | Released | GenerationEvent):
                found.append((reader.apply(message, offset=record.offset), message))
        return found

    def finals(self) -> dict[str, list[GenerationEvent]]:
        """Return the valid finals of each request."""
        finals: dict[str, list[GenerationEvent]] = {}
        for ruling, message in self.judged():
            if ruling is Ruling.CLOSED and isinstance(message, GenerationEvent):
                finals.setdefault(message.request_id, []).append(message)
        return finals

    def texts(self) -> dict[str, str]:
        """Return what each request generated in the attempt that counts."""
        texts: dict[str, str] = {}
        for ruling, message in self.judged():
            if ruling is Ruling.HOLDS:
                texts[message.request_id] = ""
            elif ruling is Ruling.TOKENS and isinstance(message, GenerationEvent):
                texts[message.request_id] += message.text
        return texts

    def starts(self) -> dict[str, list[Accepted]]:
        """Return the claims that held, of each request."""
        found: dict[str, list[Accepted]] = {}
        for ruling, message in self.judged():
            if ruling is Ruling.HOLDS and isinstance(message, Accepted):
                found.setdefault(message.request_id, []).append(message)
        return found

    def between_tokens(self) -> set[str]:
        """Return the requests that have tokens and no final."""
        started = {m.request_id for ruling, m in self.judged() if ruling is Ruling.TOKENS}
        return started - set(self.finals())

    def acks(self) -> dict[str, list[ControlAck]]:
        """Return the answers to each command, in log order."""
        found: dict[str, list[ControlAck]] = {}
        for _, message in self.messages(self.plan.acks):
            if isinstance(message, ControlAck):
                found.setdefault(message.command_id, []).append(message)
        return found

    def activations(self) -> dict[tuple[str, int], list[Message]]:
        """Return the messages of each (request, attempt) on the point's topic."""
        found: dict[tuple[str, int], list[Message]] = {}
        for _, message in self.messages(self.plan.activations("residual")):
            request_id, attempt = getattr(message, "request_id", None), getattr(message, "attempt", None)
            if request_id is not None and attempt is not None:
                found.setdefault((request_id, attempt), []).append(message)
        return found

    def dead_letters(self) -> list[Record]:
        """Return the dead letters of the prompts topic."""
        return self.read(self.plan.dlq(self.plan.prompts))

    def audit(self, *, unjudged: Iterable[str] = ()) -> list[Finding]:
        """Return what an audit of every topic finds.

        Args:
            unjudged: points that no probe host reads.
        """
        records: list[Record] = []
        for topic in self.plan.topics():
            records += self.read(topic.name)
        return audit_records(self.plan.prefix, records, unjudged=unjudged, codec=self.codec)

    def wait_finals(self, ids: Iterable[str], timeout_s: float = 60.0) -> dict[str, list[GenerationEvent]]:
        """Wait until each of these requests has a valid final; return all finals."""
        wanted = set(ids)

        def all_there() -> dict[str, list[GenerationEvent]] | None:
            finals = self.finals()
            return finals if wanted <= set(finals) else None

        return self.wait(all_there, f"finals of {len(wanted)} requests", timeout_s)

    def wait(self, condition: Callable[[], T | None], what: str, timeout_s: float = 60.0) -> T:
        """Wait for a condition that reads logs; on failure show the workers' logs."""
        try:
            return cast(T, wait_until(condition, timeout_s, what, every_s=0.1))
        except TimeoutError as exc:
            raise AssertionError(f"{exc}\n{self.logs()}") from exc

    def logs(self) -> str:
        """Return the ends of the workers' logs."""
        return "\n".join(f"--- {worker.log.name}\n{worker.tail()}" for worker in (*self._workers, *self._hosts))

    def _write_yaml(self, name: str, data: Mapping[str, Any]) -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump(dict(data), sort_keys=False), encoding="utf-8")
        return path


def _now_us() -> int:
    return time.time_ns() // 1000
