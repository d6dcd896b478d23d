"""Which streams of a partition have their state written down, and which of these records are still needed.

A stream that has been open for long holds back the offset that its partition commits, and so whoever takes over reads
all of it again. Its state is written in the same transaction as the commit; from then on it holds back its partition
at that state's position alone. The state of a closed stream stays until nobody begins below its position any more:
whoever does comes to know the stream as it was then, also where a later start was refused because of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from undercurrent.errors import ProtocolError
from undercurrent.protocol.messages import ProbeState
from undercurrent.protocol.open_stream import Stream, StreamId
from undercurrent.protocol.stream_state import read_stream

CHECKPOINT_AFTER_BYTES = 64 << 20
"""So much of its partition may be read again because of one stream."""
MAX_REPLAY_BYTES = 4 << 30
"""So much may be read again because of one stream whose probes cannot be written down; then they end."""


NEVER_BYTES = 1 << 62
"""As `checkpoint_after_bytes`: no state is ever written."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """How states are kept.

    Args:
        checkpoint_after_bytes: what of its partition may come after a stream's start, or its last state.
        max_replay_bytes: what may come after the start of a stream whose probes cannot be written down.
        service: consumer group of the host.
    """

    checkpoint_after_bytes: int = CHECKPOINT_AFTER_BYTES
    max_replay_bytes: int = MAX_REPLAY_BYTES
    service: str = ""


@dataclass(slots=True)
class _Kept:
    """The last written state of a stream.

    Args:
        start_offset: of the stream.
        position: of the state.
        floor: its offset in the topic of states is no lower.
        stream: None where nobody needs it any more.
    """

    start_offset: int
    position: int
    floor: int
    stream: Stream | None

    def serves(self, offset: int) -> bool:
        """Whether a reader that begins at an offset takes the stream up from it."""
        return self.stream is not None and self.start_offset < offset <= self.position


class KeptStates:
    """The written states of one partition."""

    def __init__(self) -> None:
        self._kept: dict[StreamId, _Kept] = {}
        self.floor = 0

    def take(self, messages: Iterable[ProbeState], offset: int, floor: int) -> list[tuple[Stream, ProbeState]]:
        """Take what was read of the topic; return the streams that go on from it, each with its message.

        Args:
            messages: the last of each stream.
            offset: from which the partition is read.
            floor: from which on the topic was read.
        """
        found: list[tuple[Stream, ProbeState]] = []
        self.floor = max(self.floor, floor)
        for message in messages:
            name = StreamId(message.request_id, message.attempt, message.index)
            kept = _Kept(message.start_offset, message.position, floor, None)
            try:
                if message.start_offset < offset <= message.position:
                    kept.stream = read_stream(message.stream, message.start_offset)
            except ProtocolError:
                pass  # as good as none: it is missed when they are counted
            self._kept[name] = kept
            if kept.stream is not None:
                kept.stream.resumes_at = kept.stream.hold = message.position
                kept.stream.start_bytes = -message.read_bytes
                found.append((kept.stream, message))
        return found

    def put(self, stream: Stream, position: int) -> None:
        """Take note that a stream's state at a position is about to be written."""
        self._kept[stream.id] = _Kept(stream.start_offset, position, self.floor, stream)

    def drop(self, low: int) -> list[StreamId]:
        """Return, and forget, the streams whose state is needed no more once readers begin at `low`."""
        gone = [
            name
            for name, kept in self._kept.items()
            if kept.stream is None or (kept.stream.end_reason and kept.position < low)
        ]
        for name in gone:
            del self._kept[name]
        return gone

    def needed(self, low: int) -> tuple[int, int]:
        """Return how many states a reader that begins at `low` takes up, and from where on they lie."""
        serving = [kept.floor for kept in self._kept.values() if kept.serves(low)]
        return len(serving), min(serving, default=0)
