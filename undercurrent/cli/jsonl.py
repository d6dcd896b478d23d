"""Messages as JSON: every field by its name, arrays as lists while they are short, tensors as shape and norm."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.codec.avro import schema_name
from undercurrent.codec.tensors import as_array
from undercurrent.errors import DecodeError
from undercurrent.protocol.messages import ActivationBlock, Message, ProbeVerdict

# A prefill chunk has thousands of positions; a line that long helps nobody.
MAX_LISTED = 64


def message_dict(message: Message) -> dict[str, Any]:
    """Return a message as plain JSON values; `type` is the name of its schema.

    Raises:
        DecodeError: an array's bytes do not fit its shape.
    """
    fields = {item.name: _plain(getattr(message, item.name)) for item in dataclasses.fields(message)}
    if isinstance(message, ActivationBlock):
        fields["positions"] = _listed(_array(message.positions, "<i4"))
        fields["token_ids"] = _listed(_array(message.token_ids, "<i4"))
        fields["data"] = _summary(as_array(message), message.dtype)
    elif isinstance(message, ProbeVerdict):
        fields["score_positions"] = _listed(_array(message.score_positions, "<i4"))
        fields["scores"] = _listed(_array(message.scores, "<f4"))
    return {"type": schema_name(message), **fields}


def dumps(value: dict[str, Any]) -> str:
    """Return one line of strict JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "), allow_nan=False)


def _plain(value: Any) -> Any:  # noqa: ANN401 - any field's value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return _number(value) if isinstance(value, float) else value


def _array(data: bytes, dtype: str) -> NDArray[Any]:
    try:
        return np.frombuffer(data, dtype)
    except ValueError as exc:
        raise DecodeError(f"{len(data)} bytes are no whole number of {np.dtype(dtype).name}") from exc


def _listed(values: NDArray[Any]) -> Any:  # noqa: ANN401 - a list, or the summary of one
    if values.size <= MAX_LISTED:
        return [_number(item) for item in values.tolist()]
    return {
        **_summary(values, values.dtype.name),
        "first": _number(values[0].item()),
        "last": _number(values[-1].item()),
    }


def _summary(array: NDArray[Any], dtype: str) -> dict[str, Any]:
    wide = array.astype(np.float64)
    return {"shape": list(array.shape), "dtype": dtype, "norm": _number(float(np.sqrt(np.sum(wide * wide))))}


def _number(value: Any) -> Any:  # noqa: ANN401 - int or float in, what JSON can say out
    """Return a number, or its name where strict JSON has none: `nan`, `inf`, `-inf`."""
    return value if np.isfinite(value) else str(value)
