"""Bytes per second of each topic, from what is served and what is captured of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from undercurrent.capacity.batches import MOST_BATCH_BYTES, Batches
from undercurrent.capacity.compression import framing_left, values_left
from undercurrent.capacity.meeting import Meeting
from undercurrent.capacity.model import ModelShape
from undercurrent.capacity.traffic import Rows, Traffic, rows_of
from undercurrent.capacity.wire import BATCH_BYTES, USUAL, Names, Stream, StreamSizes
from undercurrent.capture.points import CapturePoint
from undercurrent.errors import CaptureError, SpecValidationError
from undercurrent.spec import ExtractionPoint, UntilPolicy
from undercurrent.topics import TopicPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing:
    """How records are published.

    Args:
        codec: what producers compress with.
        partitions: of each activations topic.
        engines: workers that publish, each with a share of the requests.
        interval_ms: least time from one drain of an engine's ring to the next.
        max_record_bytes: largest record of an activations topic.
        names: that messages carry.
    """

    codec: str = "lz4"
    partitions: int = 4
    engines: int = 1
    interval_ms: float = 20.0
    max_record_bytes: int = TopicPlan().activation_bytes
    names: Names = field(default=USUAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointLoad:
    """What one point puts on its topic; all but rows and shares are per second.

    Args:
        point: its name.
        stream: what is published.
        rows: of one request.
        rows_s: rows.
        records_s: records, starts and ends of streams included.
        batches_s: batches.
        requests_met: requests that have records in a cycle of one partition, on average.
        value_bytes_s: values, before compression.
        beside_bytes_s: positions and token ids.
        framing_bytes_s: everything else of records, before compression.
        values_left: share of the values that compression leaves.
        framing_left: share of everything else that it leaves.
    """

    point: str
    stream: Stream
    rows: Rows
    rows_s: float
    records_s: float
    batches_s: float
    requests_met: float
    value_bytes_s: float
    beside_bytes_s: float
    framing_bytes_s: float
    values_left: float
    framing_left: float

    @property
    def bytes_s(self) -> float:
        """Bytes on the topic, compressed, one copy."""
        return (
            self.value_bytes_s * self.values_left
            + (self.framing_bytes_s + self.beside_bytes_s) * self.framing_left
            + self.batches_s * BATCH_BYTES
        )

    @property
    def ring_bytes_s(self) -> float:
        """Bytes that go through the engines' rings: nothing is framed or compressed there yet."""
        return self.value_bytes_s + self.beside_bytes_s


def captured(point: ExtractionPoint, model: ModelShape) -> Stream:
    """Return what a point publishes of a model.

    Raises:
        SpecValidationError: the model has not what it asks for; the error names the point.
    """
    # Which token a text is, is not known here; it changes nothing of a record.
    text = isinstance(point.until.stop_token, str)
    asked = _without_stop(point) if text else point
    try:
        found = CapturePoint.of(
            asked, layers=model.layers, width=model.width, model_dtype=model.dtype, shapes=model.shapes
        )
    except CaptureError as exc:
        raise SpecValidationError(f"{exc} ({model.path})") from exc
    return Stream.of(found)


def point_load(point: ExtractionPoint, model: ModelShape, traffic: Traffic, how: Publishing) -> PointLoad:
    """Return what a point puts on its topic.

    Raises:
        SpecValidationError: the model has not what it asks for; the error names the point.
    """
    stream, rows = captured(point, model), rows_of(point, traffic)
    sizes = StreamSizes(stream, how.names)
    pieces = sizes.pieces(round(rows.prompt), how.max_record_bytes)
    records = 2 + len(pieces) + rows.generated
    framing = sizes.ends() + sum(map(sizes.framing, pieces)) + rows.generated * sizes.framing(1)
    rate, meeting = traffic.requests_per_s, meeting_of(rows, len(pieces), traffic, how)
    value_bytes_s = rate * rows.total * stream.row_bytes
    batches_s = how.engines * how.partitions * meeting.occupied / cycle_s(traffic, how)
    return PointLoad(
        point=point.name,
        stream=stream,
        rows=rows,
        rows_s=rate * rows.total,
        records_s=rate * records,
        batches_s=max(batches_s, value_bytes_s / MOST_BATCH_BYTES),
        requests_met=meeting.requests,
        value_bytes_s=value_bytes_s,
        beside_bytes_s=rate * rows.total * stream.beside_bytes,
        framing_bytes_s=rate * framing,
        values_left=values_left(how.codec, stream.dtype, model.dtype, projected=point.reduce is not None),
        framing_left=framing_left(Batches(sizes, pieces, rows, traffic).like(meeting), how.codec),
    )


def meeting_of(rows: Rows, pieces: int, traffic: Traffic, how: Publishing) -> Meeting:
    """Return how the records of a point's requests meet: a prompt's with the start of its stream, the end a step later.

    Args:
        rows: of a request.
        pieces: records of its prompt.
        traffic: what is served.
        how: it is published.
    """
    token_s = traffic.token_ms / 1000
    times = [0.0] * (1 + pieces) + [step * token_s for step in rows.steps] + [traffic.request_s]
    rate = traffic.requests_per_s / (how.engines * how.partitions)
    return Meeting(np.maximum.accumulate(np.array(times)), rate, cycle_s(traffic, how))


def cycle_s(traffic: Traffic, how: Publishing) -> float:
    """Return the seconds from one drain that finds records to the next: records come with an engine's steps."""
    return max(how.interval_ms, traffic.token_ms) / 1000


def _without_stop(point: ExtractionPoint) -> ExtractionPoint:
    return replace(point, until=UntilPolicy())
