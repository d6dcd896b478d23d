"""What compression leaves: of values by measurement, of framing by compressing some.

A batch is compressed as a whole. Values of activations hardly repeat, so what is left of them was measured once on a
trained model's (`python -m benchmarks.plan_constants`). Framing repeats from record to record, the more the more of
them a batch has, so batches like the planned ones are encoded and compressed on the spot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from undercurrent.errors import ConfigError

CODECS: Mapping[str, Mapping[str, Any] | None] = MappingProxyType(
    {"none": None, "lz4": {"codec": "lz4"}, "zstd": {"codec": "zstd", "compression_level": 3}}
)
"""What a topic's records are compressed with, by Kafka's name; librdkafka's own levels."""

VALUES_LEFT: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "none": {},
        "lz4": {"float32 of bfloat16": 0.698},
        "zstd": {
            "float32": 0.924,
            "float32 of bfloat16": 0.472,
            "float32, projected": 0.928,
            "float16": 0.923,
            "bfloat16": 0.782,
            "int8": 0.969,
        },
    }
)
"""Share that is left of values, by codec and by what is on the wire; what is not named is left whole."""


def values_left(codec: str, wire: str, source: str, *, projected: bool) -> float:
    """Return the share of values that a codec leaves.

    Args:
        codec: one of `CODECS`.
        wire: element type on the wire.
        source: element type that the model computes in.
        projected: whether rows are projected: their floats are as full as a model's of that type.
    """
    kind = wire
    if wire == "float32" and (projected or source == "bfloat16"):
        kind = "float32, projected" if projected else "float32 of bfloat16"
    return VALUES_LEFT[codec].get(kind, 1.0)


def compressed(data: bytes, codec: str) -> int:
    """Return the bytes that a codec makes of some, or their own number where it would make more."""
    settings = CODECS[codec]
    if settings is None:
        return len(data)
    options = dict(settings)
    return min(len(data), len(pa.Codec(options.pop("codec"), **options).compress(data, asbytes=True)))


def check_codec(name: str) -> str:
    """Return the name of a codec that is known here.

    Raises:
        ConfigError: it is another one.
    """
    if name not in CODECS:
        raise ConfigError(f"--compression: {name!r:.40}; accepted: {', '.join(CODECS)}")
    return name


def framing_left(batches: Iterable[tuple[bytes, int]], codec: str) -> float:
    """Return the share that a codec leaves of all that is not values.

    Args:
        batches: each as it would be compressed, and how many bytes of values are in it: of some that no codec makes
            smaller and that do not repeat, so what is saved is the rest's.
        codec: one of `CODECS`.
    """
    framing = left = 0
    for whole, held in batches:
        framing += len(whole) - held
        left += max(0, compressed(whole, codec) - held)
    return left / framing
