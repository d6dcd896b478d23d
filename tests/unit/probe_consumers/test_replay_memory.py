"""Memory of a replay does not grow with the range, also where one request is open all along."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from probe_consumers import replay_partition
from probe_consumers.bound import set_fingerprint
from probe_consumers.replay import Span
from probe_consumers.replay_order import Origins, Part, Plan, probe_facts
from probe_consumers.replay_source import load
from probe_consumers.replay_store import part_folder, read_checkpoint
from undercurrent.kafka.records import Record
from undercurrent.probes import LinearProbe
from undercurrent.testing.streams import StreamBuilder

WIDTH, MIB = 4096, 1 << 20
BOUND_MIB = 96


class Endless:
    """A partition that is made while it is read: short requests, and one that is open from its start to its end.

    Args:
        size: bytes of it.
        point: whose.
        points: that each request has.
    """

    def __init__(self, size: int, point: str, points: tuple[str, ...]) -> None:
        self.size = size
        self.fields = {"width": WIDTH, "dtype": "bfloat16", "point": point, "points": points}

    def batches(self, part, first):
        row = np.random.default_rng(0).normal(size=(1, 1, WIDTH))
        long, offset, made, number = StreamBuilder("long", **self.fields), 0, 0, 0
        values = [(long.key, long.start())]
        while made < self.size:
            short = StreamBuilder(f"r{number}", **self.fields)
            values += [(short.key, short.start())]
            for at in range(64):
                values.append((short.key, short.block([at], row)))
                values.append((long.key, long.block([64 * number + at], row)))
            values.append((short.key, short.end()))
            number += 1
            point = self.fields["point"]
            yield [Record(point, 0, offset + at, key, value, offset + at, ()) for at, (key, value) in enumerate(values)]
            offset += len(values)
            made += sum(len(value) for _, value in values)
            values = []


def peak_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def replayed(folder: Path, size: int, points: tuple[str, ...]) -> float:
    """Replay so many bytes of each point in this process and return how far its memory has grown."""
    replay_partition.source_of = lambda origins, loaded, point: Endless(size, point, points)
    LinearProbe.from_arrays(
        np.ones(len(points) * WIDTH), 0.0, layer=0, tensor_type="residual_stream", threshold=1e9, name="guard"
    ).save(folder / "guard")
    joins = len(points) > 1
    read = f"points: [{', '.join(points)}]" if joins else f"point: {points[0]}"
    (folder / "probes.yaml").write_text(f"bindings: [{{name: guard, {read}, probe: ./guard}}]")
    origins = Origins(probes=folder / "probes.yaml", dataset=folder)
    bounds = load(origins).of_point("+".join(points))
    Plan(
        asked={"point": "+".join(points)},
        probes=probe_facts(bounds),
        fingerprint=set_fingerprint(bounds),
        source={"topics": points},
        points=points if joins else (),
        partitions=1,
        origins=origins,
        parts=tuple(Part(number=lane, span=Span(0, 10**9)) for lane in range(len(points))),
        requests=None,
    ).write(folder)
    before = peak_mib()
    replay_partition.replay_parts(folder, [0], lambda: None)
    return peak_mib() - before


@pytest.mark.parametrize("points", [("residual",), ("residual", "attn")])
def test_a_range_four_times_the_bound_is_read_within_it(tmp_path, points):
    size = 4 * BOUND_MIB * MIB // len(points)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        grown = pool.submit(replayed, tmp_path, size, points).result()
    reached = read_checkpoint(part_folder(tmp_path, 0))
    assert (reached.done, reached.read_bytes > len(points) * size) == (True, True)
    assert [(stream.request_id, lane) for stream, lane in reached.unfinished] == [("long", len(points) - 1)]
    assert grown < BOUND_MIB
