"""Messages of which a test says only what matters to it."""

from __future__ import annotations

from typing import Any

from undercurrent.protocol.messages import Accepted, GenerationEvent

_PLACE = {"prompt_partition": 0, "prompt_offset": 0}


def accepted(request_id: str = "r", attempt: int = 1, **fields: Any) -> Accepted:
    """A claim at the start of a log, by engine `e` in the incarnation that bears the attempt's number."""
    values = {"engine": "e", "incarnation": attempt, "epoch": 1, "content_hash": b"", "points": ("p",)}
    values |= {"stream_partition": 0, "accepted_at_us": 1}
    return Accepted(request_id=request_id, attempt=attempt, **(_PLACE | values | fields))


def event(request_id: str = "r", attempt: int = 1, **fields: Any) -> GenerationEvent:
    """What the holder of that claim says; `kind` and what belongs to it are the test's."""
    values = {"engine": "e", "incarnation": attempt, "emitted_at_us": 1}
    return GenerationEvent(request_id=request_id, attempt=attempt, **(_PLACE | values | fields))
