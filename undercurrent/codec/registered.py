"""The wire format of schema registries: `00`, the schema's id (4 bytes, big-endian), the body.

It is written, and both kinds of frame are read. A registry also tells schemas of later versions: a record of one of our
messages that a later version wrote is read by its own schema, and what this version does not know of it is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import fastavro
from fastavro.schema import SchemaParseException, fullname

from undercurrent.codec.avro import EARLIER, SCHEMA_NAMES, fingerprint_of, load_fingerprint
from undercurrent.codec.framing import SingleObjectFraming
from undercurrent.errors import DecodeError
from undercurrent.protocol.frames import REGISTRY_HEADER_BYTES, REGISTRY_MARKER, registry_id

NAMESPACE = "undercurrent"
_MOST_IDS = 10_000


class RegistryFraming:
    """Writes the wire format of schema registries and reads both.

    Args:
        id_of: returns the id of one of this version's schemas by its name, as it is to be written.
        text_of: returns the text of the schema with an id; raises DecodeError where the registry has none.
    """

    def __init__(self, id_of: Callable[[str], int], text_of: Callable[[int], str]) -> None:
        keys = (*SCHEMA_NAMES, *EARLIER)
        self._single = SingleObjectFraming({key: load_fingerprint(key) for key in keys})
        self._id_of = id_of
        self._text_of = text_of
        self._headers: dict[str, bytes] = {}
        self._keys: dict[int, str] = {}
        self._foreign: dict[str, dict[str, Any]] = {}

    def header(self, name: str) -> bytes:
        """Return the five bytes that stand before a body; the registry is asked once.

        Raises:
            UnreachableError: the registry does not answer.
            TopicError: the schema is not registered.
        """
        header = self._headers.get(name)
        if header is None:
            header = self._headers[name] = REGISTRY_MARKER + self._id_of(name).to_bytes(4, "big")
        return header

    def schema_of(self, data: bytes) -> tuple[str, int]:
        """Return the schema's key and the length of the frame, of either kind.

        Raises:
            DecodeError: no frame, or a schema that is none of our messages'.
            UnreachableError: the id is new and the registry does not answer.
        """
        number = registry_id(data)
        if number is None:
            return self._single.schema_of(data)
        key = self._keys.get(number)
        if key is None:
            key, foreign = recognised(self._text_of(number), number)
            if len(self._keys) >= _MOST_IDS:
                self._keys.clear()
                self._foreign.clear()
            if foreign is not None:
                self._foreign[key] = foreign
            self._keys[number] = key
        return key, REGISTRY_HEADER_BYTES

    def foreign(self, key: str) -> dict[str, Any] | None:
        """Return a schema of one of our messages that is none of this version's."""
        return self._foreign.get(key)


def recognised(text: str, number: int) -> tuple[str, dict[str, Any] | None]:
    """Return the key of a registered schema, and the schema itself where it is none of this version's.

    Args:
        text: the schema as the registry has it.
        number: its id.

    Raises:
        DecodeError: it is no schema of one of our messages.
    """
    try:
        schema = cast(dict[str, Any], fastavro.parse_schema(json.loads(text), named_schemas={}))
        found = fingerprint_of(schema)
        name = fullname(schema).removeprefix(f"{NAMESPACE}.")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, SchemaParseException) as exc:
        raise DecodeError(f"schema id {number} is no Avro schema: {type(exc).__name__}") from exc
    for key in (*SCHEMA_NAMES, *EARLIER):
        if key.partition(".")[0] == name and load_fingerprint(key) == found:
            return key, None
    if name in SCHEMA_NAMES:
        return f"{name}.id{number}", schema
    raise DecodeError(f"schema id {number} is of {name!r:.100}, which is none of our messages")
