"""The other ends of a ring: a reader that drops everything, and a writer that plays a recorded visit again.

python -m benchmarks.overhead.readers null RING            # reads and releases every 10 ms
python -m benchmarks.overhead.readers record RING FILE     # the same, and keeps the frames with their times
python -m benchmarks.overhead.readers play RING FILE       # writes them again at their times, then ends
"""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path

from undercurrent.capture.frames import STEP_STAMP, FrameKind
from undercurrent.capture.ring import Ring

INTERVAL_S = 0.010


def read(path: str, keep: Path | None) -> None:
    """Read until standard input ends."""
    reader = Ring.open(path).reader()
    kept: list[tuple[float, int, bytes]] = []
    done = False
    while not done:
        done = _ended(INTERVAL_S)
        for frame in reader.read():
            if keep is not None:
                kept.append((time.monotonic(), frame.kind, bytes(frame.payload)))
        reader.release()
    if keep is not None:
        # Our own file, written a moment ago by this benchmark and read by it alone.
        keep.write_bytes(pickle.dumps(kept))


def play(path: str, source: Path) -> None:
    """Write recorded frames at their old pace; the step frames get the present time, as a capture would give them."""
    frames: list[tuple[float, int, bytes]] = pickle.loads(source.read_bytes())  # noqa: S301 - see `read`
    writer = Ring.open(path).writer()
    print("ready", flush=True)
    sys.stdin.readline()
    began, first = time.monotonic(), frames[0][0]
    at = 0
    while at < len(frames):
        time.sleep(max(0.0, frames[at][0] - first - (time.monotonic() - began)))
        moment = frames[at][0]
        while at < len(frames) and frames[at][0] <= moment + 0.001:
            _write(writer, frames[at][1], frames[at][2])
            at += 1
        writer.commit()


def _write(writer: object, kind: int, payload: bytes) -> None:
    from undercurrent.capture.sides import RingWriter

    assert isinstance(writer, RingWriter)
    if kind != FrameKind.STEP:
        writer.commit()
        writer.put_control(kind, payload)
        return
    offset = writer.reserve(kind, len(payload))
    if offset < 0:
        raise SystemExit("the ring is full: the control cannot keep the pace of the visit that it repeats")
    writer.data[offset : offset + len(payload)] = payload
    step, _ = STEP_STAMP.unpack_from(payload)
    STEP_STAMP.pack_into(writer.data, offset, step, time.time_ns() // 1000)


def _ended(timeout_s: float) -> bool:
    import select

    readable, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return bool(readable)


if __name__ == "__main__":
    match sys.argv[1]:
        case "null":
            read(sys.argv[2], None)
        case "record":
            read(sys.argv[2], Path(sys.argv[3]))
        case "play":
            play(sys.argv[2], Path(sys.argv[3]))
