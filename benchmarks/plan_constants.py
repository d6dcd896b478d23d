"""What compression leaves of activations: the table that `undercurrent plan` uses.

    python -m benchmarks.plan_constants

Rows are the residual stream of the demo's trained model on its own prompts, every layer and token, in float32 and
rounded to bfloat16, as each encoding puts them on the wire; 32 KiB of them are compressed at once, with the libraries
and levels that Kafka's clients use. Then a linear probe of width 4,096 is timed for 10 s, as `plan --measure` times
others, and the joining of two points of that width. The last line is one JSON object: share left, by codec and by what
is on the wire, and both costs.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from undercurrent.adapters.hf.oracle import HFOracle
from undercurrent.capacity.calibration import ProbeCost, measure
from undercurrent.capacity.compression import CODECS, compressed
from undercurrent.capacity.joining import measure_join
from undercurrent.capacity.measured import LINEAR_WIDTH
from undercurrent.capacity.wire import Stream
from undercurrent.codec.tensors import bytes_of
from undercurrent.evaluation.encodings import Encoding, random_projection
from undercurrent.probes import LinearProbe
from undercurrent.probes.loading import loaded_probe
from undercurrent.testing import demo_model

PIECE_BYTES = 32 << 10
REQUESTS = 60


def activations() -> NDArray[np.float32]:
    """Return residual streams of the demo's model, float32 [rows, width]."""
    oracle, rng = HFOracle(demo_model.folder() / "model"), random.Random(0)
    found = []
    for person in demo_model.people()[:REQUESTS]:
        text = rng.choice(demo_model.PROMPTS).format(name=person.name) + demo_model.report(person.holder, rng)
        found.append(oracle.activations(list(text.encode()))["residual_stream"])
    rows: NDArray[np.float32] = np.concatenate(found)
    return rows.reshape(-1, rows.shape[-1])


def wires(rows: NDArray[np.float32]) -> dict[str, bytes]:
    """Return rows as each encoding puts them on the wire."""
    narrow = rows.astype(ml_dtypes.bfloat16)
    projected = Encoding("model", random_projection(rows.shape[1], rows.shape[1] // 4, 0)).recode(rows)
    return {
        "float32": bytes_of(rows, "float32"),
        "float32 of bfloat16": bytes_of(narrow, "float32"),
        "float32, projected": bytes_of(projected, "float32"),
        "float16": bytes_of(rows, "float16"),
        "bfloat16": bytes_of(narrow, "bfloat16"),
        "int8": bytes_of(rows, "int8"),
    }


def left(data: bytes, codec: str) -> float:
    """Return the share that a codec leaves of pieces of some bytes."""
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
    return sum(compressed(piece, codec) for piece in pieces) / len(data)


def _stream(point: str) -> Stream:
    return Stream(
        point=point,
        tensor_type="residual_stream",
        layers=(0,),
        width=LINEAR_WIDTH,
        dtype="bfloat16",
        row_bytes=2 * LINEAR_WIDTH,
    )


def linear_cost() -> ProbeCost:
    """Return what a linear probe of a usual model costs here, of width `LINEAR_WIDTH`."""
    weight = np.random.default_rng(0).standard_normal(LINEAR_WIDTH, np.float32)
    probe = LinearProbe.from_arrays(weight, 0.0, layer=0, tensor_type="residual_stream", threshold=1e9)
    return measure(loaded_probe(probe), _stream("residual"), seconds=10.0)


def main() -> None:
    """Print the table."""
    cost = linear_cost()
    sys.stdout.write(f"linear probe: {cost.record_s * 1e6:.1f} us a record, {cost.row_s * 1e6:.2f} us a row\n")
    joining = measure_join([_stream("residual"), _stream("attn")], seconds=10.0)
    sys.stdout.write(f"joining: {joining.record_s * 1e6:.1f} us a record, {joining.row_s * 1e6:.2f} us a row\n")
    rows = activations()
    found = wires(rows)
    table = {codec: {wire: round(left(data, codec), 3) for wire, data in found.items()} for codec in CODECS}
    for codec, shares in table.items():
        sys.stdout.write(f"{codec:5} " + "  ".join(f"{wire}: {share:.3f}" for wire, share in shares.items()) + "\n")
    told = {"rows": len(rows), "width": rows.shape[1], "left": table}
    sys.stdout.write(json.dumps(told | {"linear": asdict(cost), "joining": asdict(joining)}) + "\n")


if __name__ == "__main__":
    main()
