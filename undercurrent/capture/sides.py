"""The two sides of a ring, and the words of its header that they share. The contract stands in `ring`."""

from __future__ import annotations

import platform
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from undercurrent.errors import RingError

ALIGNMENT = 64
FRAME_HEAD_BYTES = 16
PAD = 0

HEADER_BYTES = 4096
MAGIC = 0x474E495243444E55  # "UNDCRING"
_FRAME_MAGIC = 0x4D524655  # "UFRM"
VERSION = 2
_FRAME_HEAD = struct.Struct("<IIQ")
MIN_CAPACITY = 4096
MAX_CONTROL_RESERVE = 1 << 20
# Of a frame that waits, beside its payload: what Python keeps for it.
_WAITING_BYTES = 128

# Indices of 8-byte words in the header page; every eighth starts a cache line.
W_MAGIC, W_VERSION, W_CAPACITY, W_RESERVE, W_SLOTS = range(5)
W_HEAD = 8
W_TAIL = 16
W_WRITER_PID, W_STEPS, W_HEARTBEAT, W_FULL, W_FRAMES, W_DROPPED, W_ERRORS, W_PENDING = range(24, 32)
W_CAPTURE_NS = 32
W_READER_PID, W_READER_HEARTBEAT = 40, 41

_STRONG_ORDER = platform.machine().lower() in {"x86_64", "amd64", "i686", "i386"}
_FENCE_LOCK = threading.Lock()


def _fence() -> None:
    """Order all earlier memory accesses of this thread before all later ones; free where the machine does so itself."""
    if not _STRONG_ORDER:
        with _FENCE_LOCK:
            pass
        with _FENCE_LOCK:
            pass


def aligned(size: int) -> int:
    """Return `size` rounded up to a multiple of `ALIGNMENT`."""
    return (size + ALIGNMENT - 1) & -ALIGNMENT


class Frame(NamedTuple):
    """One frame of the ring.

    Args:
        kind: what the payload is; the ring itself only knows `PAD`, which is never yielded.
        payload: a view on the shared memory, valid until the reader releases it.
        offset: of the frame in the ring's data, bytes.
    """

    kind: int
    payload: memoryview
    offset: int


class RingWriter:
    """The writing side: reserve, fill, and commit several frames with one store of the head.

    A reserved frame is filled before the next call. Control frames are for the time between commits: one that comes
    while data frames are uncommitted waits for `commit`, so that `rollback` never takes it along.

    Args:
        words: the ring's header, 8-byte words.
        data: the ring's frames.
        lengths: its table of lengths.

    Attributes:
        words: as above.
        data: as above.
        lengths: as above.
        reserve_bytes: that data frames leave to control frames.
        waiting_bytes: of control frames that wait in memory, roughly.
        max_payload: largest payload that can ever fit.
    """

    def __init__(self, words: memoryview, data: memoryview, lengths: memoryview) -> None:
        self.words = self._words = words
        self._capacity = len(data)
        self.reserve_bytes = self._reserve = int(words[W_RESERVE])
        self._head = self._cursor = int(words[W_HEAD])
        self._tail = int(words[W_TAIL])
        self._frames = 0
        self._pending: deque[tuple[int, bytes]] = deque()
        self.waiting_bytes = 0
        self.data = data
        self.lengths = lengths
        # A frame of this size always fits once the reader has caught up, wherever in the buffer the head stands.
        self.max_payload = ((len(data) - self._reserve) // 2 & -ALIGNMENT) - FRAME_HEAD_BYTES

    def reserve(self, kind: int, size: int) -> int:
        """Return the offset in `data` of a data frame's payload, or -1 when there is no room now.

        Args:
            kind: of the frame, above 0.
            size: of the payload, bytes, at most `max_payload`.

        Raises:
            RingError: the payload can never fit.
        """
        if size > self.max_payload:
            self._check_size(size)
        # What waits came first; a data frame must not overtake it.
        waiting = self._pending and (self._cursor != self._head or not self._flush())
        offset = -1 if waiting else self._place(kind, size, self._reserve)
        if offset < 0:
            self._words[W_FULL] += 1
        return offset

    def put_control(self, kind: int, payload: bytes) -> None:
        """Write a control frame; where even the reserve is full it waits in memory, in order. Never lost.

        Args:
            kind: of the frame, above 0.
            payload: its bytes, at most `max_payload`.

        Raises:
            RingError: the payload can never fit.
        """
        if not self.offer_control(kind, payload):
            self._check_size(len(payload))
            self._pending.append((kind, payload))
            self.waiting_bytes += len(payload) + _WAITING_BYTES
            self._words[W_PENDING] = len(self._pending)

    def offer_control(self, kind: int, payload: bytes) -> bool:
        """Write a control frame if there is room now and nothing waits; return whether it was written.

        Args:
            kind: of the frame, above 0.
            payload: its bytes.
        """
        if len(payload) > self.max_payload or self._cursor != self._head:
            return False
        if self._pending and not self._flush():
            return False
        at = self._place(kind, len(payload), 0)
        if at < 0:
            return False
        self.data[at : at + len(payload)] = payload
        self._publish()
        return True

    @property
    def released_bytes(self) -> int:
        """Bytes that the reader has given back so far; the number stands still while the reader does."""
        return int(self._words[W_TAIL])

    @property
    def head(self) -> int:
        """Bytes that were shown so far."""
        return self._head

    @property
    def settled(self) -> bool:
        """Whether everything that was written is shown and nothing waits."""
        return not self._pending and self._cursor == self._head

    def moved(self, head: int) -> None:
        """Go on behind frames that were written and shown by another way; only when `settled`."""
        self._head = self._cursor = head

    def commit(self) -> None:
        """Show everything since the last commit to the reader."""
        if self._cursor != self._head:
            self._publish()
        if self._pending:
            self._flush()

    def rollback(self) -> None:
        """Forget the data frames since the last commit."""
        self._cursor = self._head
        self._frames = 0

    def beat(self, step: int, now_us: int) -> None:
        """Record that step `step` has run, for whoever watches the engine."""
        self._words[W_STEPS] = step
        self._words[W_HEARTBEAT] = now_us

    def count_dropped(self, rows: int) -> None:
        """Count rows that were given up."""
        self._words[W_DROPPED] += rows

    def count_time(self, cpu_ns: int) -> None:
        """Add to the CPU time that capture has cost the engine's thread, nanoseconds."""
        self._words[W_CAPTURE_NS] += cpu_ns

    def count_error(self) -> None:
        """Count a capture error."""
        self._words[W_ERRORS] += 1

    def _check_size(self, size: int) -> None:
        if size > self.max_payload:
            raise RingError(f"a payload of {size} bytes never fits: at most {self.max_payload}")

    def _flush(self) -> bool:
        """Move waiting control frames into the ring; return whether none is left."""
        while self._pending:
            kind, payload = self._pending[0]
            offset = self._place(kind, len(payload), 0)
            if offset < 0:
                break
            self.data[offset : offset + len(payload)] = payload
            self._pending.popleft()
            self.waiting_bytes -= len(payload) + _WAITING_BYTES
        if self._cursor != self._head:
            self._publish()
        self._words[W_PENDING] = len(self._pending)
        return not self._pending

    def _publish(self) -> None:
        self._words[W_FRAMES] += self._frames
        self._frames = 0
        _fence()
        self._words[W_HEAD] = self._head = self._cursor

    def _place(self, kind: int, size: int, keep: int) -> int:
        """Write a frame's head and return its payload's offset, or -1 if `keep` bytes would not stay free."""
        total = (FRAME_HEAD_BYTES + size + ALIGNMENT - 1) & -ALIGNMENT  # `aligned`, without a call on the step's path
        cursor, capacity = self._cursor, self._capacity
        start = cursor % capacity
        rest = capacity - start
        need = total if total <= rest else rest + total
        limit = capacity - keep
        if cursor + need - self._tail > limit:
            self._tail = self._words[W_TAIL]
            _fence()
            if cursor + need - self._tail > limit:
                return -1
        if need != total:
            _FRAME_HEAD.pack_into(self.data, start, _FRAME_MAGIC, PAD, rest - FRAME_HEAD_BYTES)
            start = 0
        _FRAME_HEAD.pack_into(self.data, start, _FRAME_MAGIC, kind, size)
        self._cursor = cursor + need
        self._frames += 1
        return start + FRAME_HEAD_BYTES


class RingReader:
    """The reading side.

    Args:
        words: the ring's header, 8-byte words.
        data: the ring's frames.
        at: bytes ever written before the frame to begin with; by default what was released, as a reader does.
    """

    def __init__(self, words: memoryview, data: memoryview, at: int | None = None) -> None:
        self._words = words
        self._data = data
        self._capacity = len(data)
        self._tail = int(words[W_TAIL])
        self._cursor = self._tail if at is None else at

    @property
    def available_bytes(self) -> int:
        """Bytes committed and not yet read."""
        return int(self._words[W_HEAD]) - self._cursor

    def read(self) -> Iterator[Frame]:
        """Yield the frames committed before this call that were not read yet, oldest first.

        Raises:
            RingError: the ring's bytes make no sense; nothing after that offset can be trusted.
        """
        head = int(self._words[W_HEAD])
        _fence()
        if not self._cursor <= head <= self._tail + self._capacity or head % ALIGNMENT:
            raise RingError(f"a head of {head} with a tail of {self._tail} is impossible", offset=self._cursor)
        while self._cursor < head:
            start = self._cursor % self._capacity
            magic, kind, size = _FRAME_HEAD.unpack_from(self._data, start)
            total = aligned(FRAME_HEAD_BYTES + size)
            if magic != _FRAME_MAGIC or total > min(self._capacity - start, head - self._cursor):
                raise RingError(f"no frame here (magic {magic:#x}, {size} bytes)", offset=self._cursor)
            offset = self._cursor
            self._cursor += total
            if kind != PAD:
                payload_at = start + FRAME_HEAD_BYTES
                yield Frame(kind, self._data[payload_at : payload_at + size], offset)

    def release(self) -> None:
        """Give the space of every frame yielded so far back to the writer; their payloads are void from here on."""
        if self._cursor != self._tail:
            _fence()
            self._words[W_TAIL] = self._tail = self._cursor
        self._words[W_READER_HEARTBEAT] = time.time_ns() // 1000
