"""Reads the usual blocks of many records in one call; see `undercurrent.protocol.strands`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from undercurrent.codec.blocks import Prefix
from undercurrent.codec.layout import Layout, layout

_MOST_BYTES = 2**31 - 1
_MOST_TOKENS = _MOST_BYTES // 4


class Found(NamedTuple):
    """Blocks of one stream that are numbered one after the other; the fields are those of `Strand`."""

    prefix: Prefix
    values: list[bytes]
    places: bytes
    starts: bytes
    tokens: bytes
    positions: bytes


class ReadStrands(Protocol):
    """Reads records as long as they are usual blocks of streams that are known."""

    def __call__(
        self, records: list[Any], at: int, known: Mapping[bytes | None, Sequence[Prefix]], /
    ) -> tuple[int, list[tuple[Any, ...]]]:
        """Return the number of the record that ends the stretch, and the fields of a `Found` for each stream in it.

        Args:
            records: tuples whose third to fifth item are offset, key and value.
            at: number of the first.
            known: prefixes by key.
        """
        ...


def strands_in_python(
    records: list[Any], at: int, known: Mapping[bytes | None, Sequence[Prefix]], /
) -> tuple[int, list[tuple[Any, ...]]]:
    """Return what the machine code of `_blocks.c` does; see `ReadStrands`."""
    growing: dict[int, _Growing] = {}
    stop = at
    while stop < len(records) and records[stop][2] == records[at][2] + stop - at:
        key, value = records[stop][3:5]
        if not isinstance(value, bytes) or len(value) > _MOST_BYTES:
            break
        prefix = next((item for item in known.get(key, ()) if value.startswith(item.data)), None)
        block = None if prefix is None else layout(value, len(prefix.data), prefix.token_bytes)
        if prefix is None or block is None:
            break
        mine = growing.get(id(prefix)) or _Growing(prefix, block)
        if not mine.add(stop - at, value, block):
            break
        growing[id(prefix)] = mine
        stop += 1
    return stop, [mine.found() for mine in growing.values()]


class _Growing:
    """A strand that is being read.

    Args:
        prefix: of its stream.
        first: its first block.
    """

    def __init__(self, prefix: Prefix, first: Layout) -> None:
        self._prefix, self._next_seq, self._revision = prefix, first.seq, first.revision
        self._values: list[bytes] = []
        self._places, self._starts, self._tokens = array("i"), array("i"), array("i")
        self._positions = bytearray()

    def add(self, place: int, value: bytes, block: Layout) -> bool:
        """Take the next block; False where it does not follow."""
        most = 4 * _MOST_TOKENS - len(block.positions)
        if (block.seq, block.revision) != (self._next_seq, self._revision) or len(self._positions) > most:
            return False
        self._next_seq += 1
        self._values.append(value)
        self._places.append(place)
        self._starts.append(block.data)
        self._tokens.append(len(block.positions) // 4)
        self._positions += block.positions
        return True

    def found(self) -> tuple[Any, ...]:
        """Return the fields of a `Found`."""
        columns = self._places.tobytes(), self._starts.tobytes(), self._tokens.tobytes()
        return (self._prefix, self._values, *columns, bytes(self._positions))


def joined(values: Sequence[bytes], starts: bytes) -> bytes:
    """Return the data of blocks as one.

    Args:
        values: what holds them.
        starts: where in each it begins, int32; it goes on to the end.
    """
    if len(values) == 1 and not any(starts):
        return values[0]
    return b"".join([memoryview(value)[at:] for value, at in zip(values, memoryview(starts).cast("i"), strict=True)])


def _fastest() -> ReadStrands:
    try:
        from undercurrent.codec import _blocks
    except ImportError:
        return strands_in_python
    return _blocks.strands


read_strands = _fastest()
"""In machine code where that was built."""
