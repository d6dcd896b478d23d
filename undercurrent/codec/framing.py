"""Which schema wrote these bytes: the frame around an Avro body.

Single-object encoding: `C3 01`, the schema's CRC-64-AVRO fingerprint (8 bytes, little-endian), the body. A framing with
a schema registry (`00`, four bytes of id, the body) is another implementation of `Framing`.
"""

from __future__ import annotations

from typing import Protocol

from undercurrent.errors import DecodeError

SINGLE_OBJECT_MARKER = b"\xc3\x01"
HEADER_BYTES = 10


class Framing(Protocol):
    """Gives a message its frame and reads which schema it was written with."""

    def header(self, name: str) -> bytes:
        """Return the bytes that stand before a body of the schema `name`."""
        ...

    def schema_of(self, data: bytes) -> tuple[str, int]:
        """Return the key of the schema that wrote `data`, its name or an earlier version's, and where the body starts.

        Raises:
            DecodeError: the frame is none of this framing, or its schema is unknown.
        """
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
        if len(data) < HEADER_BYTES or data[:2] != SINGLE_OBJECT_MARKER:
            raise DecodeError(
                f"{len(data)} bytes that start with {data[:2].hex() or 'nothing'}: not an Avro single object (c301 ...)"
            )
        raise DecodeError(f"schema fingerprint {data[2:HEADER_BYTES].hex()} is not one of this version's")
