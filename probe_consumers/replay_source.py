"""Where a replay reads: a part of a topic, or the streams of a dataset that came from one partition."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from probe_consumers.__main__ import read_config
from probe_consumers.bound import Bound
from probe_consumers.config import HostConfig
from probe_consumers.dataset_import import DatasetImport, StreamKey
from probe_consumers.replay import Span
from probe_consumers.replay_order import Origins, Part
from probe_consumers.rollout_log import read_rollouts
from probe_consumers.versions import Versions
from undercurrent.errors import ConfigError
from undercurrent.evaluation.dataset_format import STREAMS, read_manifest, read_table
from undercurrent.kafka.client import Isolation, KafkaSettings
from undercurrent.kafka.erasures import read_erasures
from undercurrent.kafka.ranges import Piece, TopicRange
from undercurrent.kafka.records import Partition, Record
from undercurrent.probes import load_binding, load_bindings
from undercurrent.protocol.erasures import Erasures

_BATCH_BYTES = 4 << 20
# Fewer and larger requests than a live host makes, and half of what librdkafka would hold of them.
IN_BULK = {"fetch.message.max.bytes": 4 << 20, "queued.max.messages.kbytes": 32 << 10}
_STREAM_KEY = ["request_id", "attempt", "index", "point"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a process needs for a replay.

    Args:
        bounds: every binding, the probes loaded.
        config: a probe host's; None where a dataset is replayed with bindings alone.
    """

    bounds: tuple[Bound, ...]
    config: HostConfig | None

    def of_point(self, point: str) -> list[Bound]:
        """Return the bindings of a point.

        Raises:
            ConfigError: no binding reads it.
        """
        found = [bound for bound in self.bounds if bound.binding.point == point]
        if not found:
            known = ", ".join(self._points) or "none"
            raise ConfigError(f"--point {point}: no binding reads it; bindings read {known}")
        return found

    @property
    def _points(self) -> list[str]:
        """What bindings read: a point, or the common name of those that one joins."""
        return list(dict.fromkeys(bound.binding.point for bound in self.bounds))

    @property
    def only_point(self) -> str:
        """The point that every binding reads.

        Raises:
            ConfigError: they read several, or there is none.
        """
        points = self._points
        if len(points) != 1:
            raise ConfigError(f"--point: is missing; bindings read {', '.join(points) or 'none'}")
        return points[0]

    @property
    def host(self) -> HostConfig:
        """The configuration, where there is one.

        Raises:
            ConfigError: there is none.
        """
        if self.config is None:
            raise ConfigError(
                "--config: is missing; it names a probe host's configuration, with its brokers and topics"
            )
        return self.config


def versions_of(origins: Origins, loaded: Loaded, point: str) -> Versions:
    """Return which versions of the bindings of a point run on which stream.

    Raises:
        UnreachableError: what was rolled out cannot be read.
    """
    bounds = loaded.of_point(point)
    if not origins.rolled_out:
        return Versions(bounds)
    host = loaded.host
    return Versions(bounds, read_rollouts(host.kafka, host.plan.rollouts), host.artefacts)


def load(origins: Origins) -> Loaded:
    """Read configuration and probes.

    Raises:
        ConfigError: neither is named, or one is wrong.
        ProbeError: a probe does not load.
    """
    if origins.config is not None:
        config = read_config(origins.config, origins.bootstrap_servers, origins.probes)
        return Loaded(config.bounds, config)
    if origins.probes is None or origins.dataset is None:
        raise ConfigError("--config: is missing; a dataset may be replayed with --probes alone")
    base = origins.probes.parent
    bindings = load_bindings(origins.probes)
    return Loaded(tuple(Bound(binding, load_binding(binding, base=base)) for binding in bindings), None)


class RecordSource(Protocol):
    """Reads the records of one partition."""

    def batches(self, part: Part, first: int) -> Iterator[Sequence[Record]]:
        """Yield the records of a part from an offset on, in order, some at a time."""
        ...


class TopicSource:
    """Reads partitions of a topic.

    Args:
        settings: the connection.
        topic: its name.
        erasures: requests whose records are passed over.
    """

    def __init__(self, settings: KafkaSettings, topic: str, erasures: Erasures | None = None) -> None:
        options = {**IN_BULK, **settings.options}
        self._settings = settings.model_copy(update={"options": options})
        self._topic = topic
        self._erasures = erasures or Erasures()

    def batches(self, part: Part, first: int) -> Iterator[Sequence[Record]]:
        """Yield records; see `RecordSource`.

        Raises:
            ReplayError: retention deleted what was still to be read.
            UnreachableError: nothing arrives.
        """
        piece = Piece(Partition(self._topic, part.number), first, part.span.end, 0)
        for records in TopicRange(self._settings, self._topic, (piece,), Isolation.READ_UNCOMMITTED).batches():
            kept = [record for record in records if not self._erasures.covers(record.key)]
            if kept:
                yield kept


class DatasetSource:
    """Reads a dataset: the streams that came from one partition, as messages, numbered from 0.

    Args:
        folder: of the dataset.
        point: extraction point.
    """

    def __init__(self, folder: Path, point: str) -> None:
        self._folder = folder
        self._point = point

    def batches(self, part: Part, first: int) -> Iterator[Sequence[Record]]:
        """Yield records; see `RecordSource`.

        Raises:
            DatasetError: a file is missing or does not say what another one says.
        """
        mine = streams_by_partition(self._folder, self._point).get(part.number, {})
        batch, size = [], 0
        for offset, item in enumerate(DatasetImport(self._folder, mine).messages()):
            if offset >= part.span.end:
                break
            if offset < first:
                continue
            batch.append(Record(item.point, part.number, offset, item.request_id.encode(), item.value, 0, ()))
            size += len(item.value)
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def source_of(origins: Origins, loaded: Loaded, point: str) -> RecordSource:
    """Return where the records of one point are read."""
    if origins.dataset is not None:
        return DatasetSource(origins.dataset, point)
    config = loaded.host
    erasures = read_erasures(config.kafka, config.plan.erasures)
    return TopicSource(config.kafka, config.plan.activations(point), erasures)


def dataset_facts(folder: Path) -> dict[str, str]:
    """Return which dataset it is.

    Raises:
        DatasetError: it is none.
    """
    # The files alone: how often its test part was read changes the manifest, and nothing that is replayed.
    files = json.dumps(read_manifest(folder)["files"], sort_keys=True)
    return {"files_sha256": hashlib.sha256(files.encode()).hexdigest()}


def dataset_parts(folder: Path, point: str) -> tuple[Part, ...]:
    """Return a part per partition that the streams of a dataset came from; its end is no less than its messages.

    Raises:
        ConfigError: the dataset has no such point.
    """
    known = read_manifest(folder)["points"]
    if point not in known:
        raise ConfigError(f"--point {point}: {folder} has {', '.join(known) or 'none'}")
    found = streams_by_partition(folder, point)
    # A start, an end, and a block or more for each position; one that was rewound says so.
    return tuple(
        Part(number=number, span=Span(0, sum(count + 3 for count in streams.values())))
        for number, streams in sorted(found.items())
    )


def streams_by_partition(folder: Path, point: str) -> dict[int, dict[StreamKey, int]]:
    """Return the streams of a dataset at a point with their positions, by the partition that they came from."""
    columns = read_table(folder / STREAMS, [*_STREAM_KEY, "partition", "positions"]).to_pydict()
    found: defaultdict[int, dict[StreamKey, int]] = defaultdict(dict)
    for *key, partition, count in zip(*columns.values(), strict=True):
        if key[3] == point:
            found[partition][tuple(key)] = count
    return dict(found)
