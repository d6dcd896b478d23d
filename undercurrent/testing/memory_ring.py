"""Probe hosts on topics in memory: a request's stream goes in, verdicts and abort commands come out.

ring = MemoryRing("points.yaml", "probes.yaml")
ring.send(*stream_messages(make_records(rows, layers=[12], prompt_len=4)))
[command] = ring.commands()
[result] = ring.verdicts(VerdictKind.RESULT)

Everything between the bytes is a probe host's own code: codec, checks, streams and gaps, the probes' runner, recovery,
dead letters. What is missing is Kafka (see `memory_topics`), time (a host reads when it is told to), and the engine.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from undercurrent.codec import Codec
from undercurrent.evaluation.diff import Telling
from undercurrent.kafka.records import Record
from undercurrent.probes import Binding, load_binding, load_bindings
from undercurrent.protocol.dead_letters import Place, dead_letter
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Action, Commit, Fetch, Incoming, Read, SendAbort
from undercurrent.protocol.host_position import Committed, resume_from
from undercurrent.protocol.messages import (
    ControlCommand,
    Message,
    ProbeVerdict,
    PublisherStarted,
    VerdictKind,
)
from undercurrent.protocol.streams import StreamMessage
from undercurrent.spec import ExtractionPoint, ProbeSpec, check_pipeline, load_spec
from undercurrent.testing.memory_topics import MemoryTopics
from undercurrent.topics import DLQ_EXTRA_BYTES, TopicPlan, points_of

Points = ProbeSpec | Sequence[ExtractionPoint] | Mapping[str, Any] | str | os.PathLike[str]
Bindings = Sequence[Binding] | str | os.PathLike[str]


def now_us() -> int:
    """Return microseconds since the Unix epoch."""
    return time.time_ns() // 1000


class MemoryRing:
    """The topics of a pipeline in memory, with a probe host on each point that a binding reads.

    Args:
        points: extraction points: a list, or what `load_spec` takes, a path for example.
        bindings: bindings: a list, or the path of a binding list.
        base: folder that relative probe folders start from; by default the binding list's own.
        partitions: of each topic of activations and of the verdicts.
        abort_max_age_s: an older record aborts nothing.
        batch_records: most records that are decided on at once; each batch is one transaction.
        clock: microseconds since the Unix epoch.

    Raises:
        SpecError: the points are wrong, or nothing that a pipeline takes.
        ConfigError: a binding is wrong or names no point.
        ProbeError: a probe does not load.
    """

    def __init__(
        self,
        points: Points,
        bindings: Bindings,
        *,
        base: str | Path | None = None,
        partitions: int = 1,
        abort_max_age_s: float = 60.0,
        batch_records: int = 500,
        clock: Callable[[], int] = now_us,
    ) -> None:
        spec = _spec(points)
        check_pipeline(spec)
        self.plan = TopicPlan(points=tuple(spec.names), activation_partitions=partitions, verdict_partitions=partitions)
        self.topics = MemoryTopics(self.plan, clock)
        self._codec = Codec()
        self._hosts = [
            _Host(self.topics, self._codec, name, bounds, clock, int(abort_max_age_s * 1e6), batch_records)
            for name, bounds in _bounds(self.plan, bindings, base).items()
        ]
        self.restart()

    # --- in

    def send(self, *messages: Message) -> None:
        """Append messages of streams, and let every host read to the end and commit."""
        self.append(*messages)
        self.poll()

    def append(self, *messages: Message) -> None:
        """Append messages of streams, encoded, each where an engine's publisher puts it; nobody reads them yet.

        Raises:
            TopicError: no point has this name.
            TypeError: it is no message of an activations topic; `topics.append` takes any bytes.
        """
        for message in messages:
            value = self._codec.encode(message)
            if isinstance(message, PublisherStarted):
                for topic in map(self.plan.activations, self.plan.points):
                    for number in range(self.plan.activation_partitions):
                        self.topics.append(topic, value, key=None, partition=number)
            elif isinstance(message, StreamMessage):
                topic = self.plan.activations(message.point)
                self.topics.append(topic, value, key=message.request_id.encode())
            else:
                raise TypeError(
                    f"{type(message).__name__} is no message of an activations topic; accepted: PublisherStarted, "
                    f"StreamStarted, ActivationBlock, StreamInvalidated, StreamEnded"
                )

    def poll(self, *, commit: bool = True) -> None:
        """Let every host read to the end.

        Args:
            commit: write what they said; without it only abort commands leave, as in a host that dies before its
                transaction, if `restart` follows.
        """
        for host in self._hosts:
            host.poll(commit=commit)

    def restart(self) -> None:
        """Start every host anew, as after a crash: with fresh probes, from what was committed."""
        for host in self._hosts:
            host.start()

    # --- out

    def verdicts(
        self, *kinds: VerdictKind, request_id: str | None = None, probe: str | None = None
    ) -> list[ProbeVerdict]:
        """Return committed verdicts, those of a request in order.

        Args:
            *kinds: only these.
            request_id: only this request's.
            probe: only this binding's.
        """
        found = (self._codec.decode(record.value) for record in self.topics.records(self.plan.verdicts))
        return [
            item
            for item in found
            if isinstance(item, ProbeVerdict)
            and (not kinds or item.kind in kinds)
            and request_id in (None, item.request_id)
            and probe in (None, item.probe)
        ]

    def scores(self, request_id: str, probe: str) -> dict[tuple[int, int], float]:
        """Return the scores that verdicts carry, by (token position, layer)."""
        telling = Telling()
        for verdict in self.verdicts(request_id=request_id, probe=probe):
            telling.take(verdict)
        bits = np.array(list(telling.scores.values()), np.uint32)
        return dict(zip(telling.scores, bits.view(np.float32).tolist(), strict=True))

    def commands(self) -> list[ControlCommand]:
        """Return the abort commands, in order. A host that reads a stream again sends a command again, with its id."""
        found = (self._codec.decode(record.value) for record in self.topics.records(self.plan.control))
        return [item for item in found if isinstance(item, ControlCommand)]

    def dead_letters(self, point: str) -> list[Record]:
        """Return the dead letters of a point's topic: the bytes as they came, the cause in the headers.

        Raises:
            TopicError: no point has this name.
        """
        return self.topics.records(self.plan.dlq(self.plan.activations(point)))


class _Host:
    """The probe host of one point, or of several that it joins: `point_host` without clients and threads."""

    def __init__(
        self,
        topics: MemoryTopics,
        codec: Codec,
        name: str,
        bounds: Sequence[Any],
        clock: Callable[[], int],
        abort_max_age_us: int,
        batch_records: int,
    ) -> None:
        self._topics = topics
        self._codec = codec
        self._bounds = bounds
        self._clock = clock
        self._abort_max_age_us = abort_max_age_us
        self._batch_records = batch_records
        self._plan = topics.plan
        self._group = f"{self._plan.prefix}.probes.{name}"
        self._inputs = _application("inputs").Inputs.of(self._plan, points_of(name))
        self._fingerprint = _application("bound").set_fingerprint(bounds)
        self._incoming = _application("decoding").incoming
        self._committed: dict[int, Committed] = {}
        self._positions: dict[int, int] = {}

    def start(self) -> None:
        """Begin with what was committed, and nothing else."""
        runner = _application("runner").BindingRunner(self._bounds, self._group, self._clock)
        core: ProbeHost = _application("cores").core_of(self._inputs, self._fingerprint, runner, self._abort_max_age_us)
        self._core = core
        self._act(self._core.assign(range(self._plan.activation_partitions * len(self._inputs.points))))

    def poll(self, *, commit: bool) -> None:
        """Read every partition to its end."""
        while batch := self._read():
            self._act(self._core.records(batch, self._clock()))
            if commit:
                self._transact()
        if commit and self._core.dirty:
            self._transact()

    def _read(self) -> list[Incoming]:
        batch: list[Incoming] = []
        for lane, position in self._positions.items():
            room = self._batch_records - len(batch)
            topic, number = self._inputs.place(lane)
            records = self._topics.read(topic, number, position, room)
            self._positions[lane] = position + len(records)
            batch += [self._incoming(self._codec, record) for record in self._inputs.laned(records)]
        return batch

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Fetch(partition=lane):
                    end = self._topics.end(*self._inputs.place(lane))
                    resume = resume_from(self._committed.get(lane), 0, end, self._fingerprint, "earliest")
                    self._act(self._core.begin(lane, resume))
                case Commit():
                    self._transact()
                case Read(partition=lane, offset=offset):
                    self._positions[lane] = offset
                case SendAbort(command=command):
                    key = command.request_id.encode()
                    self._topics.append(self._plan.control, self._codec.encode(command), key=key, partition=0)
                case _:  # Declare: a line in a host's log
                    pass

    def _transact(self) -> None:
        transaction = self._core.transaction()
        with self._topics.transaction() as staged:
            for verdict in transaction.verdicts:
                value = self._codec.encode(verdict)
                staged.append(self._plan.verdicts, value, key=verdict.request_id.encode())
            for item in transaction.dead_letters:
                place = self._inputs.place(item.partition)
                letter = dead_letter(
                    item.cause,
                    item.detail,
                    Place(place.topic, place.number, item.offset),
                    item.raw if isinstance(item.raw, Record) else None,
                    service=self._group,
                    now_ms=self._clock() // 1000,
                    max_bytes=self._plan.activation_bytes + DLQ_EXTRA_BYTES,
                    to_offset=item.to_offset,
                )
                staged.append(
                    self._plan.dlq(place.topic),
                    letter.value,
                    key=letter.key,
                    partition=place.number,
                    headers=letter.headers,
                )
        self._committed |= {
            number: Committed(offset=offset, metadata=text) for number, (offset, text) in transaction.offsets.items()
        }


def _application(module: str) -> Any:  # noqa: ANN401 - a module
    # The probe host is an application, above this package: named as text, as the command line names it.
    return import_module(f"probe_consumers.{module}")


def _spec(points: Points) -> ProbeSpec:
    if isinstance(points, Sequence) and not isinstance(points, str):
        return ProbeSpec(1, points)
    return load_spec(points)


def _bounds(plan: TopicPlan, bindings: Bindings, base: str | Path | None) -> dict[str, list[Any]]:
    """Return the bindings with their probes, by point."""
    if isinstance(bindings, str | os.PathLike):
        path = Path(bindings)
        listed, folder = load_bindings(path), path.parent if base is None else Path(base)
    else:
        listed, folder = tuple(bindings), Path("." if base is None else base)
    by_point: dict[str, list[Any]] = defaultdict(list)
    for binding in listed:
        binding.check_points(plan.points)
        by_point[binding.point].append(_application("bound").Bound(binding, load_binding(binding, base=folder)))
    return by_point
