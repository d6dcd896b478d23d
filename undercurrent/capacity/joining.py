"""What it costs here to join the streams of several points, and what a probe then sees: no probe is in it.

Records are decoded and joined as a probe host does it, those of 32 requests at each point at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from undercurrent.capacity.calibration import STREAMS, ProbeCost
from undercurrent.capacity.wire import Names, Stream, block_of, ends_of
from undercurrent.codec import Codec
from undercurrent.codec.tensors import bytes_of, row_bytes, rows_of
from undercurrent.protocol.host_events import Emission, Incoming, Step
from undercurrent.protocol.host_position import Resume
from undercurrent.protocol.join_runner import JoinRunner
from undercurrent.protocol.joined_stream import RowFormat, joined_name
from undercurrent.protocol.joining_host import JoiningHost
from undercurrent.protocol.lanes import Lanes
from undercurrent.protocol.messages import ProbeVerdict, RunState
from undercurrent.protocol.open_stream import Stream as OpenStream

_LONG = 16
_NEVER_US = 1 << 62


def joined(streams: Sequence[Stream]) -> Stream:
    """Return what a probe sees that joins some points: all values of a token in one row, named by the first layer."""
    first, dtypes = streams[0], {stream.dtype for stream in streams}
    dtype = first.dtype if len(dtypes) == 1 and dtypes != {"int8"} else "float32"
    width = sum(len(stream.layers) * stream.width for stream in streams)
    return Stream(
        point=joined_name(stream.point for stream in streams),
        tensor_type=first.tensor_type,
        layers=first.layers[:1],
        width=width,
        dtype=dtype,
        row_bytes=row_bytes(dtype, width),
        token_ids=any(stream.token_ids for stream in streams),
    )


def measure_join(streams: Sequence[Stream], seconds: float = 2.0) -> ProbeCost:
    """Return what a record of each point costs to decode and join, on average over the points.

    Args:
        streams: what the points publish.
        seconds: of measurement.
    """
    short, long = (_seconds_per_record(streams, rows, seconds / 2) for rows in (1, _LONG))
    row_s = max(0.0, (long - short) / (_LONG - 1))
    return ProbeCost(record_s=max(0.0, short - row_s), row_s=row_s)


def _seconds_per_record(streams: Sequence[Stream], rows: int, seconds: float) -> float:
    codec = Codec()
    points = tuple(stream.point for stream in streams)
    starts, blocks = zip(*(_records(codec, stream, rows, points) for stream in streams), strict=True)
    taken = count = 0.0
    began = time.monotonic()
    while not count or time.monotonic() - began < seconds:
        host = _host(points)
        for lane, values in enumerate(starts):
            host.records(_incoming(codec, lane, 0, values), 0)
        start = time.thread_time()
        for lane, values in enumerate(blocks):
            host.records(_incoming(codec, lane, STREAMS, values), 0)
        taken += time.thread_time() - start
        count += len(blocks) * STREAMS
    return taken / count


def _records(codec: Codec, stream: Stream, rows: int, points: tuple[str, ...]) -> tuple[list[bytes], list[bytes]]:
    """Return the starts of some requests' streams, and a record of so many rows of each."""
    values = np.random.default_rng(0).standard_normal((rows, len(stream.layers), stream.width), np.float32)
    data, places = bytes_of(values, stream.dtype), np.arange(rows, dtype="<i4").tobytes()
    tokens = places if stream.token_ids else b""
    starts, blocks = [], []
    for number in range(STREAMS):
        name = f"{number:036d}"
        started, _ = ends_of(stream, Names())
        block = block_of(stream, positions=places, token_ids=tokens, data=data)
        starts.append(codec.encode(replace(started, request_id=name, points=points)))
        blocks.append(codec.encode(replace(block, request_id=name, seq=1)))
    return starts, blocks


def _incoming(codec: Codec, lane: int, first: int, values: Sequence[bytes]) -> list[Incoming]:
    return [Incoming(lane, first + at, 0, codec.decode(value), size=len(value)) for at, value in enumerate(values)]


def _host(points: Sequence[str]) -> JoiningHost:
    lanes = Lanes(points, 1)
    runner = JoinRunner(_NoProbes(), lanes, points, RowFormat(row_bytes, rows_of))
    host = JoiningHost(points, "", runner, lanes, _NEVER_US)
    host.assign(lanes.of(0))
    for lane in lanes.of(0):
        host.begin(lane, Resume(offset=0, emitted_up_to=0))
    return host


class _NoProbes:
    """A `StreamRunner` that runs nothing."""

    def process(self, steps: Sequence[Step]) -> Iterable[Emission]:
        """Say nothing."""
        return ()

    def watermarks(self, partition: int) -> Iterable[ProbeVerdict]:
        """Say nothing."""
        return ()

    def forget(self, partition: int) -> None:
        """Forget nothing."""

    def states(self, partition: int, stream: OpenStream) -> tuple[RunState, ...] | None:
        """Return that there is no state."""
        return None

    def restore(self, partition: int, stream: OpenStream, runs: Sequence[RunState], said_from: int) -> bool:
        """Take nothing up."""
        return True
