"""Reading single values of a spec: enums, layers, plain JSON.

Whatever stands in a spec came from somebody: a value may be endless, contain itself, or fail when it is printed. So
everything here is bounded, and errors show values through `shown`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from undercurrent.errors import SpecValidationError

E = TypeVar("E", bound=StrEnum)

MAX_DEPTH = 32
"""Deepest nesting of a spec or of a point's `probe_args`."""

MAX_NODES = 100_000
"""Most values of one document, aliases and shared lists written out."""

MAX_LAYERS = 4096
"""Most layers of one point."""

MAX_NUMBER = 2**31 - 1
"""Largest count, layer or token id: they are int32 on the wire."""

_MAX_INTEGER = 2**64
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel = 3


def shown(value: object) -> str:
    """Return a value as an error shows it: short, and whatever the value is."""
    try:
        return _SHORT.repr(value)[:60]
    except ValueError:  # Python prints no number of more than some thousand digits
        return "a value too long to show"


def as_enum(kind: type[E], value: object, field: str, point: str | None = None) -> E:
    """Return the member that a value names.

    Raises:
        SpecValidationError: it names none; the message lists those there are.
    """
    if isinstance(value, str):
        for member in kind:
            if member.value == value:
                return member
    accepted = ", ".join(member.value for member in kind)
    raise SpecValidationError(f"{shown(value)}; accepted: {accepted}", point=point, field=field)


def as_layers(value: object, point: str | None = None) -> tuple[int, ...]:
    """Return layers as a tuple, in the order given.

    Raises:
        SpecValidationError: none, a negative or doubled one, or something that is no whole number.
    """
    items = [value] if isinstance(value, int) else value
    if not isinstance(items, Collection) or isinstance(items, str | bytes | bytearray | Mapping):
        raise SpecValidationError(
            f"{shown(value)}; accepted: a layer or a list of layers, 0-based", point=point, field="layers"
        )
    if len(items) > MAX_LAYERS:
        raise SpecValidationError(
            f"names {len(items)} layers; accepted: up to {MAX_LAYERS}", point=point, field="layers"
        )
    layers = tuple(items)
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= MAX_NUMBER:
            raise SpecValidationError(f"{shown(layer)}; accepted: whole numbers from 0 on", point=point, field="layers")
    if not layers:
        raise SpecValidationError("is empty; name at least one layer", point=point, field="layers")
    if len(set(layers)) != len(layers):
        raise SpecValidationError(f"{shown(list(layers))} names a layer twice", point=point, field="layers")
    return layers


def as_count(value: object, field: str, point: str | None = None) -> int:
    """Return a whole number from 1 on.

    Raises:
        SpecValidationError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NUMBER:
        raise SpecValidationError(f"{shown(value)}; accepted: a whole number from 1 on", point=point, field=field)
    return value


def as_text(value: object, field: str, point: str | None = None, *, blank: bool = False) -> str:
    """Return a text that is not empty and that UTF-8 can write.

    Args:
        value: to read.
        field: named in errors.
        point: named in errors.
        blank: whether white space alone will do.

    Raises:
        SpecValidationError: it is something else.
    """
    if not isinstance(value, str) or not (value if blank else value.strip()):
        raise SpecValidationError(f"{shown(value)}; accepted: a text", point=point, field=field)
    _check_encodes(value, field, point)
    return value


def as_plain(value: object, field: str, point: str | None = None) -> dict[str, Any]:
    """Return a deep copy of a mapping that holds only what JSON can, in JSON's own types.

    Raises:
        SpecValidationError: it holds another type, a key that is no text, a NaN or an infinity, nests too deep, or is
            too large.
    """
    if not isinstance(value, Mapping):
        raise SpecValidationError(f"{shown(value)}; accepted: a mapping", point=point, field=field)
    return PlainCopy().of_mapping(value, field, point)


def as_reduction(value: object, point: str | None = None) -> dict[str, Any]:
    """Return what a point's `reduce` says: `{"project": FILE}`.

    Raises:
        SpecValidationError: it says something else.
    """
    plain = as_plain(value, "reduce", point)
    if set(plain) != {"project"}:
        raise SpecValidationError(f"{shown(plain)}; accepted: {{project: FILE}}", point=point, field="reduce")
    as_text(plain["project"], "reduce.project", point)
    return plain


class PlainCopy:
    """Copies plain data; all copies together are bounded, shared parts counted as often as they are met."""

    def __init__(self) -> None:
        self._left = MAX_NODES

    def of(self, value: object, field: str, point: str | None = None, depth: int = MAX_DEPTH) -> object:
        """Return a copy in the types None, bool, int, float, str, list and dict.

        Args:
            value: to copy.
            field: named in errors.
            point: named in errors.
            depth: levels that may still follow.

        Raises:
            SpecValidationError: it is no plain data, nests too deep or is too large.
        """
        self._left -= 1
        if self._left < 0:
            raise SpecValidationError(f"holds more than {MAX_NODES} values", point=point, field=field)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            _check_encodes(value, field, point)
            return str.__str__(value)
        if isinstance(value, int | float):
            return _number(value, field, point)
        if not isinstance(value, Mapping | list | tuple):
            accepted = "text, numbers, booleans, lists and mappings"
            raise SpecValidationError(f"{type(value).__name__}; accepted: {accepted}", point=point, field=field)
        if depth == 0:
            raise SpecValidationError("is nested too deep", point=point, field=field)
        if isinstance(value, Mapping):
            return self.of_mapping(value, field, point, depth)
        return [self.of(item, field, point, depth - 1) for item in value]

    def of_mapping(
        self, value: Mapping[Any, Any], field: str, point: str | None = None, depth: int = MAX_DEPTH
    ) -> dict[str, Any]:
        """Return a copy of a mapping; see `of`. An empty `field` stands for the whole."""
        copied: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise SpecValidationError(f"key {shown(key)}; accepted: text", point=point, field=field or None)
            _check_encodes(key, field or "keys", point)
            plain = str.__str__(key)
            copied[plain] = self.of(item, f"{field}.{plain:.60}" if field else plain[:60], point, depth - 1)
        return copied


def _number(value: float, field: str, point: str | None) -> int | float:
    if isinstance(value, int):
        if abs(value) >= _MAX_INTEGER:
            raise SpecValidationError(
                f"{shown(value)}; accepted: whole numbers of up to 64 bits", point=point, field=field
            )
        return int(value)
    if not math.isfinite(value):
        raise SpecValidationError(f"{float(value)!r}; accepted: finite numbers", point=point, field=field)
    return float(value)


def _check_encodes(text: str, field: str, point: str | None) -> None:
    # Half of a surrogate pair is text to Python and to nobody else: no file, topic or message can hold it.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SpecValidationError(
            f"{shown(text)} holds half of a surrogate pair; accepted: text", point=point, field=field
        ) from None
