"""The stream that a joining probe sees: one row per token that every point captured, its values in a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undercurrent.core import Part
from undercurrent.errors import ProbingError
from undercurrent.protocol.messages import ActivationBlock, EndReason, StreamStarted
from undercurrent.protocol.open_stream import Fault, Stream
from undercurrent.protocol.rows import Piece, block_of
from undercurrent.topics import JOIN

_FLOAT32 = "float32"


class RowFormat(NamedTuple):
    """How rows stand on the wire; `undercurrent.codec.tensors` knows.

    Args:
        row_bytes: bytes of one (token, layer), given element type and width.
        rows_of: rows from their bytes, element type and width, [n, width].
    """

    row_bytes: Callable[[str, int], int]
    rows_of: Callable[[bytes, str, int], NDArray[Any]]


def joined_name(points: Iterable[str]) -> str:
    """Return the name of several points as one."""
    return JOIN.join(points)


class JoinedStream(Stream):
    """What several points' streams of one request are together.

    Args:
        streams: of each point; None for one that has none.
        layers: of each.
        name: of the points together.
        rows: how rows stand on the wire.
        started_us: when the broker appended the first of their starts.

    Attributes:
        absent: which of the points have no stream.
        unlike: the streams are not of one engine's one run; no rows of theirs go together.
        gaps: messages that never came, before rows that were joined.
        bad: blocks whose arrays fit neither one another nor their stream.
    """

    __slots__ = (
        "_ended",
        "_faults",
        "_layers",
        "_partial",
        "_parts",
        "_rows",
        "_unjoined",
        "absent",
        "bad",
        "gaps",
        "started_us",
        "unlike",
    )

    def __init__(
        self,
        streams: Sequence[Stream | None],
        layers: Sequence[tuple[int, ...] | None],
        name: str,
        rows: RowFormat,
        started_us: int = 0,
    ) -> None:
        self.absent = tuple(side for side, stream in enumerate(streams) if stream is None)
        self.started_us = started_us
        known = [stream for stream in streams if stream is not None]
        first = known[0].started
        self._rows = rows
        self._parts = _parts(known, [mine or () for stream, mine in zip(streams, layers, strict=True) if stream])
        whole = len(known) == len(streams) and None not in layers
        self._layers = self._parts[0].layers[:1] if whole else None
        self.unlike = any(stream.started.engine != first.engine for stream in known) or any(
            stream.started.incarnation != first.incarnation for stream in known
        )
        self._ended: Sequence[Stream] | None = None
        self._unjoined = 0
        self._faults: frozenset[Fault] = frozenset()
        self._partial = any(stream.started.cached_prefix > 0 for stream in known)
        self.gaps = self.bad = 0
        super().__init__(known[0].id, self._started(known, name), known[0].start_offset)

    def _started(self, streams: Sequence[Stream], name: str) -> StreamStarted:
        first = streams[0].started
        dtypes = {stream.started.dtype for stream in streams}
        same = len(dtypes) == 1 and not dtypes & {"int8"}
        return replace(
            first,
            point=name,
            shard=0,
            shards=1,
            seq=0,
            cached_prefix=max(stream.started.cached_prefix for stream in streams),
            layers=self._layers or (),
            width=self._parts[-1].stop,
            row_shape=(),
            dtype=first.dtype if same else _FLOAT32,
            point_hash=joined_name(stream.started.point_hash for stream in streams),
            rollouts=max(stream.started.rollouts for stream in streams),
        )

    # --- what it says of itself

    @property
    def known(self) -> bool:
        """Whether every point's stream has started, so that it is known what a row is made of."""
        return self._layers is not None

    @property
    def parts(self) -> tuple[Part, ...]:
        """What its rows are made of."""
        return self._parts

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The first layer of the first point, as the name of the one column; None while a point has not started."""
        return self._layers

    @property
    def all_started(self) -> bool:
        """Whether every point has."""
        return self.known

    @property
    def all_ended(self) -> bool:
        """Whether every point has."""
        return self._ended is not None

    @property
    def missing(self) -> int:
        """Messages that never came; while it is open, those before the rows that were joined."""
        return self.bad + (self.gaps if self._ended is None else sum(stream.missing for stream in self._ended))

    @property
    def unjoined(self) -> int:
        """Rows of a point, or of a shard, that another did not have."""
        return self._unjoined if self._ended is None else self._unjoined + sum(item.unjoined for item in self._ended)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Why it is not complete, however it ends."""
        return tuple(sorted({*self._faults, *((Fault.CONFLICT,) if self.unlike else ())}))

    @property
    def complete(self) -> bool:
        """Whether every point has ended with every record seen, and every row was joined."""
        whole = self._ended is not None and self.known and all(stream.complete for stream in self._ended)
        return whole and self.fault is None and self.bad == 0 and self._unjoined == 0

    @property
    def partial(self) -> bool:
        """Whether positions are missing for a declared reason."""
        return self._partial or any(stream.partial for stream in self._ended or ())

    @property
    def cut(self) -> bool:
        """Whether rows were left out after its start for a declared reason."""
        return any(stream.cut for stream in self._ended or ())

    # --- what happens to it

    def harm(self, unjoined: int, bad: int, faults: Collection[Fault], clear_up_to: int) -> None:
        """Take note of what is wrong with it by now.

        Args:
            unjoined: rows that never leave.
            bad: blocks whose arrays fit neither one another nor their stream.
            faults: of its points' streams.
            clear_up_to: its clear mark.
        """
        self._unjoined, self.bad, self.clear_up_to = unjoined, bad, clear_up_to
        self._faults = frozenset(faults)

    def join(self, pieces: Sequence[Piece], count: int) -> ActivationBlock:
        """Return the first rows of the points' blocks as one block."""
        started = self.started
        same = started.dtype != _FLOAT32 or all(piece.block.dtype == _FLOAT32 for piece in pieces)
        wide = [self._bytes(piece, count) if same else self._float32(piece, count) for piece in pieces]
        kind = {"width": started.width, "dtype": started.dtype, "tensor_type": started.tensor_type, "row_shape": ()}
        data = np.concatenate(wide, axis=1).tobytes()
        return block_of(pieces, count, started.layers, data, point=started.point, revision=0, **kind)

    def _bytes(self, piece: Piece, count: int) -> NDArray[Any]:
        return piece.cells(count).reshape(count, -1)

    def _float32(self, piece: Piece, count: int) -> NDArray[Any]:
        rows = self._rows.rows_of(piece.cells(count).tobytes(), piece.block.dtype, piece.block.width)
        return rows.astype(np.float32).reshape(count, -1)

    def finish(self, reason: str, streams: Sequence[Stream] | None) -> None:
        """End it.

        Args:
            reason: why.
            streams: those of the points, closed; None where it ends before they do.
        """
        self._ended = streams
        plain = reason == EndReason.FINISHED.value
        self.end_reason = Fault.CONFLICT.value if plain and self.unlike else reason


def _parts(streams: Sequence[Stream], layers: Sequence[tuple[int, ...]]) -> tuple[Part, ...]:
    parts: list[Part] = []
    for stream, mine in zip(streams, layers, strict=True):
        started = stream.started
        start = parts[-1].stop if parts else 0
        parts.append(
            Part(
                point=started.point,
                layers=mine,
                width=started.width,
                tensor_type=started.tensor_type,
                start=start,
                stop=start + len(mine) * started.width,
            )
        )
    return tuple(parts)


def cell_bytes(rows: RowFormat, started: StreamStarted) -> int:
    """Return the bytes of one (token, layer) of a stream; -1 where nobody knows its element type."""
    try:
        return rows.row_bytes(started.dtype, started.width)
    except ProbingError:
        return -1
