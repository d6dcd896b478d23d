"""The message of the erasures topic; see `undercurrent.protocol.messages`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """A request is erased. Topic: erasures, key: request_sha256."""

    request_sha256: str
    author: str = ""
    reason: str = ""
    erased_at_us: int
