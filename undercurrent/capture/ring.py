"""A single-producer, single-consumer ring of frames in memory that two processes share.

The ring is a memfd: nothing to clean up, gone with its last holder. Its creator hands `Ring.path` to the writer and to
the reader, which open it with `Ring.open`.

    reader = Ring.open(path).reader()
    for frame in reader.read():      # every frame committed so far, oldest first
        use(frame.kind, frame.payload)   # a view on the ring itself, valid until release()
    reader.release()                 # frees what read() has yielded, not more

Layout. One header page, `capacity` bytes of frames, and the table of `lengths` (8 bytes for each running request, see
there; neither side of the ring touches it). `head` (bytes ever written, stored by the writer alone) and
`tail` (bytes ever released, stored by the reader alone) only grow; they stand on cache lines of their own. A frame
starts at a multiple of 64 bytes with 16 bytes: magic, kind, payload length. Frames never wrap: a PAD frame fills the
end of the buffer. `reader.read` checks every word of this and raises `RingError` with the offset.

No locks. What is relied on: an aligned 8-byte store through a `memoryview` of format `q` is one machine store, and a
frame's bytes are visible before the head that covers them. x86-64 keeps stores in order and loads in order, so nothing
more is needed there. On other machines `sides._fence` puts two uncontended lock round trips between the two accesses: a
release followed by an acquire cannot be passed by either side, which makes them a full barrier.

Back-pressure. Data frames may not use the last `control_reserve` bytes, so that control frames (a stream opens, closes,
lost something) find room when the reader is slow; beyond that they wait in the writer's memory, in order.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass

from undercurrent.capture.identity import is_alive, own_mark, pid_of
from undercurrent.capture.sides import (
    ALIGNMENT,
    FRAME_HEAD_BYTES,
    HEADER_BYTES,
    MAGIC,
    MAX_CONTROL_RESERVE,
    MIN_CAPACITY,
    PAD,
    VERSION,
    W_CAPACITY,
    W_CAPTURE_NS,
    W_DROPPED,
    W_ERRORS,
    W_FRAMES,
    W_FULL,
    W_HEAD,
    W_HEARTBEAT,
    W_MAGIC,
    W_PENDING,
    W_READER_HEARTBEAT,
    W_READER_PID,
    W_RESERVE,
    W_SLOTS,
    W_STEPS,
    W_TAIL,
    W_VERSION,
    W_WRITER_PID,
    Frame,
    RingReader,
    RingWriter,
    aligned,
)
from undercurrent.errors import RingError

__all__ = ["ALIGNMENT", "FRAME_HEAD_BYTES", "PAD", "Frame", "Ring", "RingReader", "RingStats", "RingWriter"]

DEFAULT_SLOTS = 65_536
_MAX_SLOTS = 1 << 24
_NOTE_AT, _NOTE_BYTES = 1024, 3000
_MADV_POPULATE_WRITE = 23  # of linux/mman.h; `mmap` does not name it


@dataclass(frozen=True, slots=True)
class RingStats:
    """What both sides have written about themselves, for metrics and liveness.

    Args:
        used_bytes: bytes between tail and head.
        limit_bytes: capacity.
        steps: scheduler steps that the writer has seen.
        heartbeat_us: writer's clock at its last step, microseconds since the Unix epoch, 0 before the first.
        frames: frames committed.
        full_events: frames that found no room at once.
        dropped_rows: (token, point) rows that were given up.
        capture_errors: capture errors so far, malformed orders included.
        pending_controls: control frames that wait in the writer's memory.
        capture_ns: CPU time of the engine's thread outside the model that went into capture, by a sample of its steps.
        writer_pid: 0 before there was one.
        reader_pid: 0 before there was one.
        reader_heartbeat_us: reader's clock at its last release.
    """

    used_bytes: int
    limit_bytes: int
    steps: int
    heartbeat_us: int
    frames: int
    full_events: int
    dropped_rows: int
    capture_errors: int
    pending_controls: int
    capture_ns: int
    writer_pid: int
    reader_pid: int
    reader_heartbeat_us: int


class Ring:
    """The mapped memory. Use `create` or `open`, then exactly one of `writer()` and `reader()` per process.

    Args:
        fd: file descriptor of the memory; owned from here on.
        size: bytes to map, header and table included.
        slots: entries of the table of lengths.
    """

    def __init__(self, fd: int, size: int, slots: int) -> None:
        self._fd = fd
        # MAP_POPULATE: page faults are taken now, not in the middle of a step.
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self._bytes = memoryview(self._map)
        self.words = self._bytes[:HEADER_BYTES].cast("q")
        self.capacity = size - HEADER_BYTES - 8 * slots
        self.data = self._bytes[HEADER_BYTES : HEADER_BYTES + self.capacity]
        self.lengths = self._bytes[HEADER_BYTES + self.capacity :].cast("q")
        self._closed = False

    @classmethod
    def create(cls, capacity: int, *, control_reserve: int | None = None, slots: int = DEFAULT_SLOTS) -> Ring:
        """Return a new, empty ring whose pages are all allocated.

        Args:
            capacity: bytes for frames, at least 4096; rounded up to whole pages.
            control_reserve: bytes kept back for control frames; a sixteenth of the capacity, at most 1 MiB, by default.
            slots: entries of the table of lengths.

        Raises:
            RingError: the memory cannot be had, or the sizes make no sense.
        """
        capacity = (capacity + 4095) & -4096
        if capacity < MIN_CAPACITY:
            raise RingError(f"a ring needs at least {MIN_CAPACITY} bytes, not {capacity}")
        reserve = aligned(min(MAX_CONTROL_RESERVE, capacity // 16) if control_reserve is None else control_reserve)
        if not 0 < reserve <= capacity // 2:
            raise RingError(f"a control reserve of {reserve} bytes does not fit a ring of {capacity}")
        if not 0 < slots <= _MAX_SLOTS:
            raise RingError(f"a ring has 1 to {_MAX_SLOTS} slots, not {slots}")
        size = HEADER_BYTES + capacity + 8 * slots
        fd = os.memfd_create("undercurrent-ring", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
            ring = cls(fd, size, slots)
        except OSError as exc:
            os.close(fd)
            raise RingError(
                f"cannot allocate a ring of {size} bytes: {exc}; a smaller publisher.ring_mib needs less"
            ) from exc
        ring.words[W_VERSION] = VERSION
        ring.words[W_CAPACITY] = capacity
        ring.words[W_RESERVE] = reserve
        ring.words[W_SLOTS] = slots
        ring.words[W_MAGIC] = MAGIC
        return ring

    @classmethod
    def open(cls, path: str) -> Ring:
        """Return the ring that another process created.

        Args:
            path: its `Ring.path`.

        Raises:
            RingError: there is none, or it is not one that this version can use.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise RingError(f"cannot open the ring {path}: {exc}") from exc
        size = os.fstat(fd).st_size
        if size < HEADER_BYTES + MIN_CAPACITY:
            os.close(fd)
            raise RingError(f"{path} has {size} bytes: not a ring")
        header = memoryview(os.pread(fd, 8 * (W_SLOTS + 1), 0)).cast("q")
        slots = header[W_SLOTS]
        if (
            header[W_MAGIC] != MAGIC
            or header[W_VERSION] != VERSION
            or not 0 < slots <= _MAX_SLOTS
            or header[W_CAPACITY] != size - HEADER_BYTES - 8 * slots
        ):
            os.close(fd)
            raise RingError(f"{path} is not a ring of version {VERSION}")
        try:
            return cls(fd, size, slots)
        except OSError as exc:
            os.close(fd)
            raise RingError(f"cannot map the ring {path}: {exc}") from exc

    @property
    def path(self) -> str:
        """Path by which another process of the same user opens this ring while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def control_reserve(self) -> int:
        """Bytes that data frames leave to control frames."""
        return int(self.words[W_RESERVE])

    def set_note(self, text: str) -> None:
        """Leave a text for the other processes, such as why the writer cannot start; cut at 3,000 bytes.

        Args:
            text: replaces the one before.
        """
        data = text.encode()[:_NOTE_BYTES]
        self._bytes[_NOTE_AT : _NOTE_AT + 4] = (0).to_bytes(4, "little")
        self._bytes[_NOTE_AT + 4 : _NOTE_AT + 4 + len(data)] = data
        self._bytes[_NOTE_AT : _NOTE_AT + 4] = len(data).to_bytes(4, "little")

    @property
    def note(self) -> str:
        """The text that was left last, empty before there was one."""
        size = min(int.from_bytes(self._bytes[_NOTE_AT : _NOTE_AT + 4], "little"), _NOTE_BYTES)
        return bytes(self._bytes[_NOTE_AT + 4 : _NOTE_AT + 4 + size]).decode(errors="replace")

    def stats(self) -> RingStats:
        """Return the counters of both sides; each is exact, together they may be a moment apart."""
        words = self.words
        tail = words[W_TAIL]
        return RingStats(
            used_bytes=max(0, words[W_HEAD] - tail),
            limit_bytes=self.capacity,
            steps=words[W_STEPS],
            heartbeat_us=words[W_HEARTBEAT],
            frames=words[W_FRAMES],
            full_events=words[W_FULL],
            dropped_rows=words[W_DROPPED],
            capture_errors=words[W_ERRORS],
            pending_controls=words[W_PENDING],
            capture_ns=words[W_CAPTURE_NS],
            writer_pid=pid_of(words[W_WRITER_PID]),
            reader_pid=pid_of(words[W_READER_PID]),
            reader_heartbeat_us=words[W_READER_HEARTBEAT],
        )

    def writer(self) -> RingWriter:
        """Claim the writing side.

        Raises:
            RingError: another living process has it.
        """
        _claim(self.words, W_WRITER_PID, "writer")
        # MAP_POPULATE has mapped the pages of a shared mapping for reading alone. A kernel before 5.14 knows no advice.
        with contextlib.suppress(OSError):
            self._map.madvise(_MADV_POPULATE_WRITE)
        return RingWriter(self.words, self.data, self.lengths)

    def reader(self) -> RingReader:
        """Claim the reading side.

        Raises:
            RingError: another living process has it.
        """
        _claim(self.words, W_READER_PID, "reader")
        return RingReader(self.words, self.data)

    def close(self) -> None:
        """Give the mapping and the descriptor back. Views still held keep the memory until they go."""
        if self._closed:
            return
        self._closed = True
        os.close(self._fd)
        try:
            self.words.release()
            self.data.release()
            self.lengths.release()
            self._bytes.release()
            self._map.close()
        except BufferError:
            # A payload or an array on the ring is still alive; the mapping ends with it.
            return


def _claim(words: memoryview, word: int, role: str) -> None:
    holder, own = words[word], own_mark()
    if holder not in {0, own} and is_alive(holder):
        raise RingError(f"process {pid_of(holder)} is already the {role} of this ring")
    words[word] = own
