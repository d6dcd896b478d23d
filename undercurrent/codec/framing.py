"""Which schema wrote these bytes: the frame around an Avro body.

Here is the framing that needs nobody; the one of schema registries is `codec.registered`.
"""

from __future__ import annotations

from typing import Any, Protocol

from undercurrent.errors import DecodeError
from undercurrent.protocol.frames import HEADER_BYTES, SINGLE_OBJECT_MARKER, registry_id


class Framing(Protocol):
    """Gives a message its frame and reads which schema it was written with."""

    def header(self, name: str) -> bytes:
        """Return the bytes that stand before a body of the schema `name`.

        Raises:
            UnreachableError: what it takes is not known, and who knows it does not answer.
        """
        ...

    def schema_of(self, data: bytes) -> tuple[str, int]:
        """Return the key of the schema that wrote `data`, and where the body starts.

        The key is the schema's name, an earlier version's key, or one that `foreign` knows.

        Raises:
            DecodeError: the frame is none of this framing, or its schema is unknown.
            UnreachableError: who knows the schema does not answer.
        """
        ...

    def foreign(self, key: str) -> dict[str, Any] | None:
        """Return a schema of one of our records that is none of this version's, parsed; None for any other key."""
        ...


class SingleObjectFraming:
    """Avro single-object encoding over a fixed set of schemas.

    Args:
        fingerprints: CRC-64-AVRO fingerprint of each schema, 8 bytes little-endian, by the schema's key.
    """

    def __init__(self, fingerprints: dict[str, bytes]) -> None:
        self._headers = {name: SINGLE_OBJECT_MARKER + value for name, value in fingerprints.items()}
        self._names = {header: name for name, header in self._headers.items()}

    def header(self, name: str) -> bytes:
        """Return the ten bytes that stand before a body."""
        return self._headers[name]

    def schema_of(self, data: bytes) -> tuple[str, int]:
        """Return the schema's key and the length of the frame.

        Raises:
            DecodeError: no Avro single object, or a fingerprint that is not known here.
        """
        name = self._names.get(data[:HEADER_BYTES])
        if name is not None:
            return name, HEADER_BYTES
        number = registry_id(data)
        if number is not None:
            raise DecodeError(
                f"written by id {number} of a schema registry, and no registry is named here (schema.registry.url in "
                "the kafka section)"
            )
        if len(data) < HEADER_BYTES or data[:2] != SINGLE_OBJECT_MARKER:
            raise DecodeError(
                f"{len(data)} bytes that start with {data[:2].hex() or 'nothing'}: not an Avro single object (c301 ...)"
            )
        raise DecodeError(f"schema fingerprint {data[2:HEADER_BYTES].hex()} is not one of this version's")

    def foreign(self, key: str) -> dict[str, Any] | None:
        """Return None: a fingerprint does not tell its schema."""
        return None
