"""What a probe costs on this machine: records are decoded, scored and taken in, as a probe host does it.

The host's Kafka client and its verdicts are not in it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from undercurrent.capacity.wire import Stream, block_of
from undercurrent.codec import Codec, as_array, positions
from undercurrent.codec.tensors import bytes_of
from undercurrent.core import BatchProbe, Probe, RequestContext, StreamFacts, score_rows, wanted_layers
from undercurrent.errors import ProbeError
from undercurrent.probes import LoadedProbe
from undercurrent.protocol.messages import ActivationBlock
from undercurrent.spec import ActivationRecord, TensorType

STREAMS = 32
"""Requests whose records are scored together, as a host does with what it has fetched."""

_LONG = 64
_NO_PROMPT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCost:
    """Seconds of one core.

    Args:
        record_s: for a record, whatever it holds.
        row_s: for each row in it.
    """

    record_s: float
    row_s: float

    def cores(self, records_s: float, rows_s: float) -> float:
        """Return the cores that so many records and rows a second take."""
        return records_s * self.record_s + rows_s * self.row_s


def measure(probe: LoadedProbe, stream: Stream, seconds: float = 2.0) -> ProbeCost:
    """Return what a probe costs, from records of one row and of many.

    Args:
        probe: to run.
        stream: what its point publishes.
        seconds: of measurement.

    Raises:
        ProbeError: the probe does not take such a stream.
    """
    short, long = (_seconds_per_record(probe, stream, rows, seconds / 2) for rows in (1, _LONG))
    row_s = max(0.0, (long - short) / (_LONG - 1))
    return ProbeCost(record_s=max(0.0, short - row_s), row_s=row_s)


def _seconds_per_record(probe: LoadedProbe, stream: Stream, rows: int, seconds: float) -> float:
    """Return the processor time of a record with so many rows: what else runs on the machine is not in it."""
    codec = Codec()
    records = [codec.encode(_block(stream, rows, number)) for number in range(STREAMS)]
    taken = count = 0.0
    began = time.monotonic()
    while not count or time.monotonic() - began < seconds:
        # Fresh instances: a probe that has acted has less to do.
        instances = [_spawned(probe, stream, number) for number in range(STREAMS)]
        start = time.thread_time()
        _feed(probe, instances, codec, records)
        taken += time.thread_time() - start
        count += STREAMS
    return taken / count


def _feed(probe: LoadedProbe, instances: list[Probe], codec: Codec, records: list[bytes]) -> None:
    blocks = [block for block in map(codec.decode, records) if isinstance(block, ActivationBlock)]
    batch = probe.batch
    if batch is None:
        for instance, block in zip(instances, blocks, strict=True):
            _one_by_one(instance, block)
        return
    layers = wanted_layers(batch, blocks[0].layers)
    if not layers:
        raise ProbeError(f"the probe reads none of the layers {list(blocks[0].layers)}")
    columns = [blocks[0].layers.index(layer) for layer in layers]
    values = np.concatenate(
        [as_array(block).reshape(-1, len(block.layers), block.width)[:, columns] for block in blocks]
    )
    scores = score_rows(
        batch, values.reshape(-1, values.shape[-1]), lambda: np.tile(np.array(layers, np.int32), len(values))
    )
    scores = scores.reshape(len(values), len(layers), *scores.shape[1:])
    each = len(values) // len(blocks)
    for number, (instance, block) in enumerate(zip(instances, blocks, strict=True)):
        assert isinstance(instance, BatchProbe)  # noqa: S101 - of the same class as the sample
        instance.on_scores(positions(block), layers, scores[number * each : (number + 1) * each])


def _one_by_one(instance: Probe, block: ActivationBlock) -> None:
    values = as_array(block)
    for place, position in enumerate(positions(block).tolist()):
        for column, layer in enumerate(block.layers):
            instance.on_activation(
                ActivationRecord(
                    request_id=block.request_id,
                    extraction_point_name=block.point,
                    layer=layer,
                    token_pos=position,
                    tensor_type=TensorType(block.tensor_type),
                    tensor=values[place, column],
                    is_generated=True,
                )
            )


def _spawned(probe: LoadedProbe, stream: Stream, number: int) -> Probe:
    instance = probe.factory.spawn(f"r{number}", stream.point)
    facts = StreamFacts(
        prompt_len=_NO_PROMPT,
        layers=stream.layers,
        width=stream.width,
        tensor_type=stream.tensor_type,
        dtype="float32" if stream.dtype == "int8" else stream.dtype,
        row_shape=stream.row_shape,
        model_fingerprint=_fitted_on(probe, "model"),
        lora=_fitted_on(probe, "lora"),
    )
    instance.on_start(RequestContext(f"r{number}", stream=facts))
    return instance


def _fitted_on(probe: LoadedProbe, what: str) -> str:
    """Return what a stored probe was fitted on: the plan's model stands in for it."""
    config = getattr(getattr(probe.sample, "artefact", None), "config", None)
    return "" if config is None else str(getattr(config.fingerprints, what) or "")


def _block(stream: Stream, rows: int, number: int) -> ActivationBlock:
    rng = np.random.default_rng(number)
    values: NDArray[np.float32] = rng.standard_normal((rows, len(stream.layers), stream.width), np.float32)
    places = np.arange(rows, dtype="<i4").tobytes()
    return block_of(
        stream, positions=places, token_ids=places if stream.token_ids else b"", data=bytes_of(values, stream.dtype)
    )
