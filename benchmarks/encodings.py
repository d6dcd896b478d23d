"""What each encoding of a point loses, on activations of a small model, and what it costs.

    python -m benchmarks.encodings --width 512 --layers 4

Rows are the residual stream of a Llama of random weights, of every layer and token, in float32 and rounded to bfloat16;
then the same with one dimension that is 1,000 times as large as a row's root mean square, as large models have them.
Each is encoded as the engine does it, read as a probe host does it, and compared with what the model computed. Times
are of this thread alone (`thread_time`), per element. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.adapters.hf.oracle import HFOracle
from undercurrent.capture.encoding import FLOATS, encoder_of
from undercurrent.codec.tensors import row_bytes, rows_of
from undercurrent.testing.tiny_models import build_tiny_model

ENCODINGS = ("model", "float32", "float16", "bfloat16", "int8")
OUTLIER = 7
TOKENS = 64
REPEATS = 20


def activations(layers: int, width: int, sequences: int) -> NDArray[np.float32]:
    """Return residual streams of a small model, float32 [tokens, layers, width]."""
    with tempfile.TemporaryDirectory() as folder:
        oracle = HFOracle(build_tiny_model("llama", Path(folder) / "model", layers=layers, width=width))
    rng = np.random.default_rng(0)
    runs = [oracle.activations(rng.integers(0, 256, TOKENS).tolist()) for _ in range(sequences)]
    return np.concatenate([run["residual_stream"] for run in runs])


def with_outlier(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows with one dimension 1,000 times as large as the row's root mean square."""
    out = rows.copy()
    out[..., OUTLIER] = 1000 * np.sqrt(np.mean(rows * rows, axis=-1))
    return out


def encoded(rows: NDArray[Any], source: str, encoding: str) -> tuple[NDArray[np.float64], float]:
    """Return rows as a probe reads them, float64, and the nanoseconds that an element took to encode."""
    tokens, layers, width = rows.shape
    encoder = encoder_of("point", source, encoding, layers=layers, width=width)
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(tokens, -1)
    dtype, out = (source, raw) if encoder is None else (encoder.dtype, np.empty((tokens, encoder.row_bytes), np.uint8))
    taken = 0.0
    if encoder is not None:
        encoder.encode(raw, out)
        began = time.thread_time_ns()
        for _ in range(REPEATS):
            encoder.encode(raw, out)
        taken = (time.thread_time_ns() - began) / (REPEATS * rows.size)
    return rows_of(out.tobytes(), dtype, width).astype(np.float64).reshape(rows.shape), taken


def errors(exact: NDArray[np.float64], got: NDArray[np.float64]) -> dict[str, float]:
    """Return relative L2 error of a row (median, largest), the largest error over its RMS, and the lowest cosine."""
    norms, difference = np.linalg.norm(exact, axis=-1), got - exact
    relative = np.linalg.norm(difference, axis=-1) / norms
    rms = np.sqrt(np.mean(exact * exact, axis=-1, keepdims=True))
    cosines = np.sum(exact * got, axis=-1) / (norms * np.maximum(np.linalg.norm(got, axis=-1), 1e-300))
    return {
        "relative_l2_median": float(np.median(relative)),
        "relative_l2_max": float(relative.max()),
        "max_over_rms": float((np.abs(difference) / rms).max()),
        "one_minus_cosine_max": float(1 - cosines.min()),
    }


def measure(rows: NDArray[np.float32], source: str, encoding: str) -> dict[str, float]:
    """Return what an encoding does to some rows; `rest_` leaves the outlier's dimension out."""
    stored = rows.astype(FLOATS[source])
    exact = stored.astype(np.float64)
    got, taken = encoded(stored, source, encoding)
    rest = [np.delete(values, OUTLIER, axis=-1) for values in (exact, got)]
    width = rows.shape[-1]
    return {
        "bytes_per_element": row_bytes(source if encoding == "model" else encoding, width) / width,
        "ns_per_element": taken,
        **errors(exact, got),
        "rest_relative_l2_max": errors(*rest)["relative_l2_max"],
    }


def main() -> None:
    """Print a table and a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=4)
    arguments = parser.parse_args()
    plain = activations(arguments.layers, arguments.width, arguments.sequences)
    results: dict[str, dict[str, float]] = {}
    print(
        "| rows | model | encoding | B/element | ns/element | L2 median | L2 max | max / RMS | 1 - cosine | rest, L2 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kind, rows in (("plain", plain), ("outlier", with_outlier(plain))):
        for source in ("float32", "bfloat16"):
            for encoding in ENCODINGS:
                found = measure(rows, source, encoding)
                results[f"{kind}/{source}/{encoding}"] = found
                cells = " | ".join(f"{value:.2g}" for value in list(found.values())[1:])
                print(f"| {kind} | {source} | {encoding} | {found['bytes_per_element']:.3f} | {cells} |")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
