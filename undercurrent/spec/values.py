"""Reading single values of a spec: enums, layers, plain JSON."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from undercurrent.errors import SpecValidationError

E = TypeVar("E", bound=StrEnum)

MAX_DEPTH = 32
"""Deepest nesting of a spec or of a point's `probe_args`."""


def as_enum(kind: type[E], value: object, field: str, point: str | None = None) -> E:
    """Return the member that a value names.

    Raises:
        SpecValidationError: it names none; the message lists those there are.
    """
    try:
        return kind(value)  # type: ignore[arg-type]  # any value may be asked for
    except ValueError:
        accepted = ", ".join(member.value for member in kind)
        raise SpecValidationError(f"{value!r:.60}; accepted: {accepted}", point=point, field=field) from None


def as_layers(value: object, point: str | None = None) -> tuple[int, ...]:
    """Return layers as a tuple, in the order given.

    Raises:
        SpecValidationError: none, a negative or doubled one, or something that is no whole number.
    """
    items = [value] if isinstance(value, int) else value
    if not isinstance(items, Iterable) or isinstance(items, str | bytes | Mapping):
        raise SpecValidationError(
            f"{value!r:.60}; accepted: a layer or a list of layers, 0-based", point=point, field="layers"
        )
    layers = tuple(items)
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < 2**31:
            raise SpecValidationError(f"{layer!r:.60}; accepted: whole numbers from 0 on", point=point, field="layers")
    if not layers:
        raise SpecValidationError("is empty; name at least one layer", point=point, field="layers")
    if len(set(layers)) != len(layers):
        raise SpecValidationError(f"{list(layers)!r:.60} names a layer twice", point=point, field="layers")
    return layers


def as_count(value: object, field: str, point: str | None = None) -> int:
    """Return a whole number from 1 on.

    Raises:
        SpecValidationError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise SpecValidationError(f"{value!r:.60}; accepted: a whole number from 1 on", point=point, field=field)
    return value


def as_plain(value: object, field: str, point: str | None = None) -> dict[str, Any]:
    """Return a deep copy of a mapping that holds only what JSON can.

    Raises:
        SpecValidationError: it holds another type, a key that is no text, a NaN or an infinity, or nests too deep.
    """
    if not isinstance(value, Mapping):
        raise SpecValidationError(f"{value!r:.60}; accepted: a mapping", point=point, field=field)
    _check_plain(value, field, point, MAX_DEPTH)
    return copy.deepcopy(dict(value))


def _check_plain(value: object, field: str, point: str | None, depth: int) -> None:
    if depth == 0:
        raise SpecValidationError("is nested too deep", point=point, field=field)
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise SpecValidationError(f"key {key!r:.60}; accepted: text", point=point, field=field)
            _check_plain(item, f"{field}.{key}", point, depth - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_plain(item, field, point, depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise SpecValidationError(f"{value!r}; accepted: finite numbers", point=point, field=field)
    elif value is not None and not isinstance(value, str | int | float):
        raise SpecValidationError(
            f"{type(value).__name__}; accepted: text, numbers, booleans, lists and mappings", point=point, field=field
        )
