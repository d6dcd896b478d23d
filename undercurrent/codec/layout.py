"""What stands in a usual block behind what all blocks of its stream begin with."""

from __future__ import annotations

from typing import NamedTuple

_POSITIVE = bytes(range(0x80))
"""Highest bytes of numbers that are not negative."""


class Layout(NamedTuple):
    """What stands behind a prefix; `data` is where the values begin."""

    seq: int
    revision: int
    step: int
    captured_at_us: int
    positions: bytes
    token_ids: bytes
    data: int


def layout(value: bytes, at: int, token_bytes: int) -> Layout | None:
    """Return what stands behind a prefix of a usual block; None where anything about it is unusual.

    Args:
        value: the record's.
        at: where its numbers begin.
        token_bytes: bytes of values per token.
    """
    try:
        seq, at = _number(value, at)
        revision, at = _number(value, at)
        step, at = _number(value, at)
        captured_at_us, at = _number(value, at)
        positions, at = _bytes(value, at)
        token_ids, at = _bytes(value, at)
        size, at = _number(value, at)
    except IndexError:
        return None
    tokens, rest = divmod(len(positions), 4)
    if (
        not tokens
        or rest
        or size != token_bytes * tokens
        or at + size != len(value)
        or len(token_ids) not in (0, len(positions))
        or positions[3::4].translate(None, _POSITIVE)
    ):
        return None
    return Layout(seq, revision, step, captured_at_us, positions, token_ids, at)


def _number(value: bytes, at: int) -> tuple[int, int]:
    """Return the Avro long that begins somewhere, and where it ends.

    Raises:
        IndexError: the bytes end before it, or it is longer than any long.
    """
    byte = value[at]
    at += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at
    found, shift = byte & 0x7F, 7
    while True:
        byte = value[at]
        at += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            if found >> 64:
                raise IndexError
            return (found >> 1) ^ -(found & 1), at
        shift += 7


def _bytes(value: bytes, at: int) -> tuple[bytes, int]:
    size, at = _number(value, at)
    if size < 0:
        raise IndexError
    return value[at : at + size], at + size
