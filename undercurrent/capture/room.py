"""What is said while nobody reads the ring is bounded: memory must not grow with every request of a long outage."""

from __future__ import annotations

from undercurrent.capture.frames import Fault, encode
from undercurrent.capture.sides import RingWriter
from undercurrent.errors import CaptureError

MAX_WAITING_BYTES = 16 << 20
"""Of what waits in memory for a reader, from which on no further stream is opened."""

MAX_FAULTS_BYTES = 1 << 20
"""Of what waits beyond that, from which on faults are counted and not told."""

_MAX_DETAIL = 500


def check_room(writer: RingWriter) -> None:
    """Refuse another stream where too much waits already.

    Args:
        writer: of the ring.

    Raises:
        CaptureError: so it is.
    """
    if writer.waiting_bytes > MAX_WAITING_BYTES:
        raise CaptureError("nobody has read what was captured for a long time: no further stream is opened")


def tell_fault(writer: RingWriter, kind: str, detail: str, engine_id: str, now_us: int) -> bool:
    """Count a fault, and tell it where there is room; return whether it is told.

    Args:
        writer: of the ring.
        kind: `bad_order` or `capture_error`.
        detail: what went wrong.
        engine_id: the engine's id of the request, empty for none.
        now_us: microseconds since the Unix epoch.
    """
    writer.count_error()
    if writer.waiting_bytes > MAX_WAITING_BYTES + MAX_FAULTS_BYTES:
        return False
    writer.put_control(*encode(Fault(kind=kind, detail=detail[:_MAX_DETAIL], engine_id=engine_id, at_us=now_us)))
    return True
