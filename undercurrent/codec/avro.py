"""Messages to Avro bytes and back, with the schemas in `schemas/`."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Hashable, Mapping
from enum import StrEnum
from functools import cache
from importlib.resources import files
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import fastavro
from fastavro.read import SchemaResolutionError
from fastavro.schema import fingerprint, to_parsing_canonical_form

from undercurrent.codec.framing import Framing, SingleObjectFraming
from undercurrent.errors import DecodeError, EncodeError
from undercurrent.protocol import messages
from undercurrent.protocol.messages import Message

_CLASSES: Mapping[str, type[Any]] = {
    "ActivationRecord" if cls is messages.ActivationBlock else cls.__name__: cls for cls in get_args(Message)
}
SCHEMA_NAMES = tuple(_CLASSES)


EARLIER = (
    "ActivationRecord.1",
    "StreamStarted.1",
    "GenerationEvent.1",
    "Label.1",
    "ControlAck.1",
    "StreamStarted.2",
    "GenerationEvent.2",
    "ControlAck.2",
    "GenerationEvent.3",
    "ControlCommand.1",
    "StreamStarted.3",
)
"""Schemas that earlier versions wrote with, oldest first: what stands on a topic stays readable."""


@cache
def load_schema(key: str) -> dict[str, Any]:
    """Return one of the schemas, parsed by fastavro.

    Args:
        key: name of the record, for example `StreamStarted`, or one of `EARLIER`.
    """
    return cast(dict[str, Any], fastavro.parse_schema(json.loads(schema_text(key)), named_schemas={}))


@cache
def load_fingerprint(key: str) -> bytes:
    """Return the CRC-64-AVRO fingerprint of a schema's canonical form, 8 bytes little-endian."""
    return fingerprint_of(load_schema(key))


def fingerprint_of(schema: dict[str, Any]) -> bytes:
    """Return the CRC-64-AVRO fingerprint of a parsed schema's canonical form, 8 bytes little-endian."""
    text: str = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
    # fastavro prints the fingerprint's bytes in the order in which single-object encoding stores them.
    return bytes.fromhex(text)


def schema_text(key: str) -> str:
    """Return the text of one of the schemas, as it is told to others: with its words."""
    path = f"earlier/{key}.avsc" if key in EARLIER else f"{key}.avsc"
    return files("undercurrent.schemas").joinpath(path).read_text(encoding="utf-8")


def versions_of(name: str) -> list[str]:
    """Return the keys of every released version of a schema, oldest first; the last one is the name itself."""
    return [*(key for key in EARLIER if key.partition(".")[0] == name), name]


_FAULTS = (
    EOFError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    OverflowError,
    MemoryError,
    SchemaResolutionError,
)
"""What reading bytes that are not what their schema says may raise."""


def schema_name(message: Message) -> str:
    """Return the Avro name of a message."""
    cls = type(message)
    return "ActivationRecord" if cls is messages.ActivationBlock else cls.__name__


class Codec:
    """Encodes and decodes every message of the protocol.

    Args:
        framing: what stands before each body; single-object encoding by default.
    """

    def __init__(self, framing: Framing | None = None) -> None:
        keys = (*SCHEMA_NAMES, *EARLIER)
        self._framing = framing or SingleObjectFraming({key: load_fingerprint(key) for key in keys})
        self._schemas = {key: load_schema(key) for key in keys}
        self._builders = _builders()

    def encode(self, message: Message) -> bytes:
        """Return the framed Avro bytes of a message.

        Raises:
            EncodeError: a field has a value that its schema refuses; the field is named.
        """
        name = schema_name(message)
        return self.header(name) + self.encode_body(message)

    def encode_body(self, message: Message) -> bytes:
        """Return a message's Avro body without a frame: what a content hash is taken over.

        Raises:
            EncodeError: a field has a value that its schema refuses.
        """
        name = schema_name(message)
        out = io.BytesIO()
        try:
            fastavro.schemaless_writer(out, self._schemas[name], _plain(message))
        except (ValueError, TypeError, OverflowError, KeyError, AttributeError) as exc:
            raise EncodeError(f"{name}: {exc}") from exc
        return out.getvalue()

    def header(self, name: str) -> bytes:
        """Return the frame that stands before a body of the schema `name`."""
        return self._framing.header(name)

    def schema_of(self, data: bytes) -> tuple[str, int]:
        """Return the key of the schema that wrote some bytes, `NAME` or `NAME.VERSION`, and the length of their frame.

        Raises:
            DecodeError: they have no frame that is known here, or are of an unknown schema.
            UnreachableError: a schema registry would have to say, and does not answer.
        """
        return self._framing.schema_of(data)

    def decode(self, data: bytes | None) -> Message:
        """Return the message in some bytes.

        Raises:
            DecodeError: they are empty, of an unknown schema, cut short, or not what the schema says.
            UnreachableError: a schema registry would have to say what they are, and does not answer.
        """
        if not data:
            raise DecodeError("no bytes: a tombstone or an empty value")
        key, start = self._framing.schema_of(data)
        writer = self._schemas.get(key) or self._framing.foreign(key) or {}
        name = key.partition(".")[0]
        # What an earlier schema did not have yet gets this version's default.
        reader = None if key == name else self._schemas[name]
        stream = io.BytesIO(data)
        stream.seek(start)
        try:
            fields = cast(dict[str, Any], fastavro.schemaless_reader(stream, writer, reader))
            rest = len(data) - stream.tell()
            if rest:
                raise DecodeError(f"{name}: {rest} bytes after the end of the record")
            message: Message = self._builders[name](fields)
        except _FAULTS as exc:
            raise DecodeError(f"{name}: {type(exc).__name__}: {exc}") from exc
        return message


_ATOMS = frozenset((str, int, float, bool, bytes, NoneType))
"""Types of nearly all fields, which are encoded as they are."""


def _plain(value: Any) -> Any:  # noqa: ANN401 - any field's value
    names = _field_names(cast(Hashable, type(value)))
    if names is not None:
        return {name: item if type(item := getattr(value, name)) in _ATOMS else _plain(item) for name in names}
    if isinstance(value, tuple):
        return [item if type(item) in _ATOMS else _plain(item) for item in value]
    return value


@cache
def _field_names(kind: Hashable) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields, None where it is none."""
    return tuple(item.name for item in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


@cache
def _builders() -> Mapping[str, Callable[[dict[str, Any]], Any]]:
    """Return what makes messages, by their names."""
    return {name: _builder(cls) for name, cls in _CLASSES.items()}


def _builder(cls: type[Any]) -> Callable[[dict[str, Any]], Any]:
    """Return a function that makes a message from fastavro's dict; what each field needs is worked out once."""
    hints = get_type_hints(cls)
    converters = [(name, convert) for name, hint in hints.items() if (convert := _converter(hint)) is not None]

    def build(fields: dict[str, Any]) -> Any:  # noqa: ANN401 - one of the message classes
        for name, convert in converters:
            fields[name] = convert(fields[name])
        return cls(**fields)

    return build


def _converter(hint: Any) -> Callable[[Any], Any] | None:  # noqa: ANN401 - a type hint
    if get_origin(hint) is UnionType:
        inner = _converter(next(arg for arg in get_args(hint) if arg is not NoneType))
        return None if inner is None else lambda value: None if value is None else inner(value)
    if get_origin(hint) is tuple:
        item = _converter(get_args(hint)[0])
        return tuple if item is None else lambda value: tuple(map(item, value))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint
    return _builder(hint) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None
