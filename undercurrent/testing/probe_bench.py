"""Probe hosts under test: topics, configuration, processes to kill, and what they wrote.

bench = ProbeBench(broker.settings(), folder, assignor=Assignor.RANGE)
bench.save_linear("guard", weight=[1, 0, 0, 0], threshold=1.0)
host = bench.start_host(bench.configure([{"name": "guard", "point": "residual", "probe": "./guard"}]))
bench.write(stream.key, [stream.start(), stream.block([0], rows), stream.end()])
bench.wait(lambda: bench.last_words())
host.terminate()
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from numpy.typing import ArrayLike

from undercurrent import subjects
from undercurrent.errors import UnreachableError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import Assignor, Isolation, KafkaSettings
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Record
from undercurrent.probes import LinearProbe
from undercurrent.protocol.messages import ControlCommand, ProbeHeartbeat, ProbeVerdict, VerdictKind
from undercurrent.testing.app_process import AppProcess
from undercurrent.topics import JOIN, TopicPlan, partition_of

T = TypeVar("T")


class ProbeBench:
    """One point's topics, or those of several that are joined, and the hosts that read them.

    Args:
        settings: the connection.
        folder: for configuration, probes and logs.
        assignor: of the hosts' group.
        point: the extraction point.
        others: points that hosts join with it.
        partitions: of each topic.
        layers: that each names.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        folder: Path,
        *,
        assignor: Assignor = Assignor.RANGE,
        point: str = "residual",
        others: Sequence[str] = (),
        partitions: int = 2,
        layers: Sequence[int] = (0,),
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.points = (point, *others)
        self.point = JOIN.join(self.points)
        self.plan = TopicPlan(
            prefix=f"t{uuid.uuid4().hex[:10]}",
            points=self.points,
            prompt_partitions=1,
            activation_partitions=partitions,
            verdict_partitions=2,
        )
        self.topic = self.plan.activations(point)
        self._assignor = assignor
        self._codec = subjects.codec_of(settings, self.plan)
        self._publisher = Publisher(settings)
        self._hosts: list[AppProcess] = []
        TopicAdmin(settings).apply(self.plan)
        subjects.apply(settings, self.plan)
        self.wait(self._have_leaders, "leaders of the new topics", interval_s=0.05)
        self._write_yaml(
            "points.yaml", {"version": 1, "extraction_points": [_point(name, layers) for name in self.points]}
        )

    def __enter__(self) -> ProbeBench:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.close()
        self._publisher.close()

    # --- what is under test

    def save_linear(self, name: str, weight: ArrayLike, threshold: float, *, layer: int = 0, **fields: Any) -> None:  # noqa: ANN401
        """Write a linear probe as a folder beside the configuration."""
        probe = LinearProbe.from_arrays(
            weight, 0.0, layer=layer, tensor_type="residual_stream", threshold=threshold, name=name, **fields
        )
        probe.save(self.folder / name)

    def configure(self, bindings: Sequence[Mapping[str, Any]], *, name: str = "host.yaml", **keys: Any) -> Path:  # noqa: ANN401
        """Write a probe host's configuration.

        Args:
            bindings: the bindings.
            name: of the file.
            **keys: further keys of it; `slot` and `group` are those of its service.
        """
        service: dict[str, Any] = {"name": keys.pop("group", "probes"), "assignor": str(self._assignor)}
        if "slot" in keys:
            service["slot"] = keys.pop("slot")
        return self._write_yaml(
            name,
            {
                "kafka": self.settings.keys(),
                "topics": {
                    "prefix": self.plan.prefix,
                    "prompt_partitions": 1,
                    "activation_partitions": self.plan.activation_partitions,
                    "verdict_partitions": 2,
                },
                "points": "points.yaml",
                "service": service,
                "bindings": [dict(binding) for binding in bindings],
                **keys,
            },
        )

    @property
    def group(self) -> str:
        """Consumer group of the hosts: one of this bench's own, since brokers are shared."""
        return f"{self.plan.prefix}.probes.{self.point}"

    def start_host(
        self, config: Path, environment: Mapping[str, str] | None = None, options: Sequence[str] = ()
    ) -> AppProcess:
        """Start a probe host; `environment` is added to this process's own, `options` to its command."""
        log = self.folder / f"host-{len(self._hosts)}.log"
        host = AppProcess("probe_consumers", config, log, environment, options)
        self._hosts.append(host)
        return host

    # --- the log

    def partition(self, key: bytes) -> int:
        """Return the partition of a request's streams."""
        return partition_of(key.decode(), self.plan.activation_partitions)

    def write(
        self,
        key: bytes | None,
        values: Iterable[bytes | None],
        *,
        partition: int | None = None,
        point: str | None = None,
    ) -> None:
        """Append records to the point's topic, or another's, and wait until the broker has them."""
        number = partition if partition is not None else self.partition(key or b"")
        topic = self.topic if point is None else self.plan.activations(point)
        for value in values:
            refused = self._publisher.produce(topic, value, key=key, partition=number)
            if refused is not None:
                raise RuntimeError(refused.reason)
        left = self._publisher.flush(60.0)
        if left:
            raise RuntimeError(f"{left} records did not arrive")

    def read(self, topic: str, isolation: Isolation = Isolation.READ_COMMITTED) -> list[Record]:
        """Return every record of a topic, up to its end as it is now."""
        starts: dict[tuple[str, int], int] = dict.fromkeys(OffsetLookup(self.settings).partitions(topic), 0)
        with AssignedReader(self.settings, starts, isolation=isolation) as reader:
            return list(reader.read_to_end(30.0))

    def verdicts(self, *kinds: VerdictKind) -> list[ProbeVerdict]:
        """Return the committed verdicts, each partition's in order."""
        found = (self._codec.decode(record.value) for record in self.read(self.plan.verdicts))
        return [item for item in found if isinstance(item, ProbeVerdict) and (not kinds or item.kind in kinds)]

    def last_words(self) -> list[ProbeVerdict]:
        """Return results and errors."""
        return self.verdicts(VerdictKind.RESULT, VerdictKind.ERROR)

    def heartbeats(self) -> list[ProbeHeartbeat]:
        """Return the heartbeats that announce probes, in order; a host's first record announces none."""
        found = (self._codec.decode(record.value) for record in self.read(self.plan.verdicts))
        return [item for item in found if isinstance(item, ProbeHeartbeat) and item.probes]

    def commands(self) -> list[ControlCommand]:
        """Return the abort commands, in order."""
        found = (self._codec.decode(record.value) for record in self.read(self.plan.control))
        return [item for item in found if isinstance(item, ControlCommand)]

    def dead_letters(self) -> list[Record]:
        """Return the dead letters of the point's topic."""
        return self.read(self.plan.dlq(self.topic))

    def logs(self) -> str:
        """Return what the hosts printed, for a failing test."""
        return "\n".join(f"--- {host.log.name}\n{host.log.read_text(errors='replace')}" for host in self._hosts)

    def wait(self, condition: Callable[[], T], what: str = "", timeout_s: float = 60.0, interval_s: float = 0.1) -> T:
        """Return a condition's first true value.

        Raises:
            TimeoutError: it did not come true in time; the message has the hosts' logs.
        """
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s:g} s: {what or condition}\n{self.logs()}")
            time.sleep(interval_s)
        return value

    def _have_leaders(self) -> bool:
        lookup = OffsetLookup(self.settings)
        try:
            return all(lookup.end(lookup.partitions(topic.name)) for topic in self.plan.topics())
        except UnreachableError:
            return False

    def _write_yaml(self, name: str, data: Mapping[str, Any]) -> Path:
        path = self.folder / name
        # JSON first: what it can hold, YAML writes without tags.
        path.write_text(yaml.safe_dump(json.loads(json.dumps(data))), encoding="utf-8")
        return path


def _point(name: str, layers: Sequence[int]) -> dict[str, Any]:
    return {
        "name": name,
        "layers": list(layers),
        "tensor_type": "residual_stream",
        "position": "*",
        "execution_mode": "async",
        "queue_depth": 64,
        "probe_type": "linear",
        "probe_kind": "trajectory",
    }
