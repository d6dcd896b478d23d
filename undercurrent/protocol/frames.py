"""The frames that stand before a record's Avro body, told apart by their first bytes.

Single-object encoding: `C3 01`, the schema's CRC-64-AVRO fingerprint (8 bytes, little-endian), the body. The wire
format of schema registries: `00`, the schema's id there (4 bytes, big-endian), the body.
"""

from __future__ import annotations

SINGLE_OBJECT_MARKER = b"\xc3\x01"
HEADER_BYTES = 10
REGISTRY_MARKER = b"\x00"
REGISTRY_HEADER_BYTES = 5


def registry_id(data: bytes) -> int | None:
    """Return the id under which a schema registry knows the schema of some bytes; None where they have no such frame.

    Args:
        data: a record's value.
    """
    if len(data) < REGISTRY_HEADER_BYTES or data[:1] != REGISTRY_MARKER:
        return None
    return int.from_bytes(data[1:REGISTRY_HEADER_BYTES], "big")


def body_of(data: bytes) -> bytes:
    """Return what stands behind the frame, of either kind; all of it where there is none."""
    if data[:2] == SINGLE_OBJECT_MARKER:
        return data[HEADER_BYTES:]
    return data if registry_id(data) is None else data[REGISTRY_HEADER_BYTES:]
