"""A replay of a dataset without a broker: bindings and recordings on disk, and a process that dies when told to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml

from probe_consumers import replay_partition
from probe_consumers.replay_command import ReplayResult, replay
from probe_consumers.replay_order import Origins, ReplayOrder
from probe_consumers.replay_store import PartStore
from probe_consumers.replay_tables import score_batch
from tests.unit.probe_consumers.dataset_doubles import Topics
from undercurrent.probes import LinearProbe
from undercurrent.testing.streams import StreamBuilder

WEIGHT = [1.0, -2.0, 0.5, 0.25]
RESULTS = ("verdicts.parquet", "scores.parquet", "left_out.parquet", "cut.parquet", "summary.json")


class Killed(BaseException):
    """What ends a process in the middle."""


def save_probe(folder: Path, *, threshold: float = 1.5, **fields) -> Path:
    """Write a probe and a file of bindings that names it; return the file."""
    probe = LinearProbe.from_arrays(
        WEIGHT, 0.0, layer=0, tensor_type="residual_stream", threshold=threshold, name="guard", **fields
    )
    probe.save(folder / "guard")
    bindings = folder / "probes.yaml"
    bindings.write_text(yaml.safe_dump({"bindings": [{"name": "guard", "point": "residual", "probe": "./guard"}]}))
    return bindings


def record(folder: Path, names, *, partitions: int = 2, blocks: int = 8) -> Path:
    """Write a dataset of streams that are interleaved; return its folder."""
    topics, rng = Topics(partitions=partitions), np.random.default_rng(1)
    streams = [StreamBuilder(name, dtype="bfloat16") for name in names]
    for stream in streams:
        topics.activations(stream, stream.start())
    for at in range(blocks):
        for stream in streams:
            topics.activations(stream, stream.block([at], rng.normal(size=4), step=at))
    for stream in streams:
        topics.activations(stream, stream.end())
    topics.export(folder)
    return folder


def order(dataset: Path, probes: Path, out: Path, **fields) -> ReplayOrder:
    origins = Origins(probes=probes, dataset=dataset)
    return ReplayOrder(origins=origins, point="residual", out=out, **({"compare": "none"} | fields))


def run(dataset: Path, probes: Path, out: Path, **fields) -> ReplayResult:
    return replay(order(dataset, probes, out, **fields))


def bytes_of(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in RESULTS}


class Mortal:
    """Makes a replay in this process die at its n-th step, before or after it is written; steps are small.

    Args:
        monkeypatch: pytest's.
        step_records: after how many records outputs are written.
    """

    def __init__(self, monkeypatch, step_records: int = 7) -> None:
        monkeypatch.setattr(replay_partition, "STEP_RECORDS", step_records)
        self.steps, self.dies_at, self.after = 0, -1, False
        commit = PartStore.commit

        def mortal(store, verdicts, left_out, reached, others):
            self.steps += 1
            if self.steps == self.dies_at and not self.after:
                store._logs["scores"].append(score_batch(verdicts))  # half of it was written
                raise Killed
            commit(store, verdicts, left_out, reached, others)
            if self.steps == self.dies_at:
                raise Killed

        monkeypatch.setattr(PartStore, "commit", mortal)
