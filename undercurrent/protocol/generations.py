"""The generations log is the arbiter of attempts and finals: the one reader rule that everybody applies.

Feed every record of a generations partition, in log order, to `GenerationsReader.apply`; it rules on each. Worker,
`follow`, release gate and tests share this code, so they cannot disagree about who holds an attempt or which final is
valid:

- An attempt is held by the pair (attempt, incarnation) of the first Accepted that raised the request's highest attempt.
  An Accepted that does not raise it, or comes when every child has its final, is void; so is one that nobody could
  outbid.
- Tokens, Released and finals count only when they carry the holder's pair. After the holder's Released nothing of that
  pair counts.
- The first final that counts closes its child (`index`); everything of that child after it is void, in any attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from undercurrent.protocol.messages import Accepted, GenerationEvent, GenerationKind, Released

MAX_EARLIER = 16
MOST_ATTEMPTS = 1 << 62
"""An Accepted with so high an attempt or epoch is void: there would be no number left above it that fits a message."""


class Ruling(StrEnum):
    """What a record of the log means to every reader."""

    HOLDS = "holds"
    """An Accepted took the request: tokens that open children got from lower attempts are void from here on."""
    TOKENS = "tokens"
    """Tokens of the holder, for a child that is open."""
    CLOSED = "closed"
    """The valid final of a child; there is exactly one per child."""
    RELEASED = "released"
    """The holder gave the attempt up; another attempt will follow."""
    ANSWERED = "answered"
    """An answer to a second prompt of the same id (duplicate, refused): it changes nothing."""
    VOID = "void"
    """Nothing: a record of somebody who does not hold the request, or one that came too late."""


@dataclass(slots=True, kw_only=True)
class RequestState:
    """What the log says of one request so far.

    Args:
        request_id: its id.
        attempt: highest attempt that was accepted.
        incarnation: incarnation that holds it.
        engine: name of the engine that holds it.
        epoch: epoch that the holder claimed under.
        points: extraction points of the holder's attempt.
        stream_partition: partition of its streams.
        n: number of children.
        prompt_partition: partition of its prompt.
        prompt_offset: offset of its prompt.
        content_hash: hash of the prompt's body, as the holder computed it.
        first_offset: offset of the first Accepted that was read, where a new owner has to begin to know the same.
        released: the holder gave it up.
        unexplained: pairs (attempt, incarnation) that were accepted and neither released nor closed.
        finals: the valid final of each child that has one.
        earlier: the attempts before, whose streams may be open, oldest first; the last `MAX_EARLIER` of them.
    """

    request_id: str
    attempt: int
    incarnation: int
    engine: str
    epoch: int
    points: tuple[str, ...]
    stream_partition: int
    n: int
    prompt_partition: int
    prompt_offset: int
    content_hash: bytes
    first_offset: int
    released: bool = False
    unexplained: list[tuple[int, int]] = field(default_factory=list)
    finals: dict[int, GenerationEvent] = field(default_factory=dict)
    earlier: tuple[RequestState, ...] = ()

    @property
    def holder(self) -> tuple[int, int]:
        """The pair (attempt, incarnation) whose records count."""
        return self.attempt, self.incarnation

    @property
    def closed(self) -> bool:
        """Every child has its valid final."""
        return len(self.finals) >= self.n

    @property
    def open_children(self) -> tuple[int, ...]:
        """Children that have no valid final yet, in order."""
        return tuple(index for index in range(self.n) if index not in self.finals)


class GenerationsReader:
    """Applies the reader rule to the records of one or several generations partitions.

    A request never leaves its partition, so only the order inside a partition matters. A reader that starts inside the
    log knows a request from the first Accepted that it reads; what came before is void to it.
    """

    def __init__(self) -> None:
        self._requests: dict[str, RequestState] = {}

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> RequestState | None:
        """Return what the log says of a request, None where it has not been accepted."""
        return self._requests.get(request_id)

    def is_closed(self, request_id: str) -> bool:
        """Return whether every child of the request has its valid final."""
        state = self._requests.get(request_id)
        return state is not None and state.closed

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request, to bound memory. Records of it that still come are void."""
        self._requests.pop(request_id, None)

    def apply(self, message: Accepted | Released | GenerationEvent, *, offset: int) -> Ruling:
        """Rule on the next record.

        Args:
            message: the record.
            offset: its offset in its partition.
        """
        if isinstance(message, Accepted):
            return self._accepted(message, offset)
        if isinstance(message, GenerationEvent) and message.kind not in (GenerationKind.TOKENS, GenerationKind.FINAL):
            return Ruling.ANSWERED
        state = self._requests.get(message.request_id)
        if state is None:
            return Ruling.VOID
        pair = (message.attempt, message.incarnation)
        if isinstance(message, Released):
            # Also one of a pair that no longer holds explains its Accepted: that worker lived and gave it up by itself.
            if pair in state.unexplained:
                state.unexplained.remove(pair)
            if pair != state.holder or state.released or state.closed:
                return Ruling.VOID
            state.released = True
            return Ruling.RELEASED
        if pair != state.holder or state.released or message.index in state.finals or not 0 <= message.index < state.n:
            if message.kind is GenerationKind.FINAL and pair != state.holder and pair in state.unexplained:
                state.unexplained.remove(pair)  # void, but whoever wrote it did not die of this request
            return Ruling.VOID
        if message.kind is GenerationKind.TOKENS:
            return Ruling.TOKENS
        state.finals[message.index] = message
        if state.closed:
            state.unexplained.clear()
        return Ruling.CLOSED

    def _accepted(self, message: Accepted, offset: int) -> Ruling:
        known = self._requests.get(message.request_id)
        if known is not None and (known.closed or message.attempt <= known.attempt):
            return Ruling.VOID
        if max(message.attempt, message.epoch) >= MOST_ATTEMPTS:
            return Ruling.VOID
        self._requests[message.request_id] = RequestState(
            request_id=message.request_id,
            attempt=message.attempt,
            incarnation=message.incarnation,
            engine=message.engine,
            epoch=message.epoch,
            points=message.points,
            stream_partition=message.stream_partition,
            n=message.n,
            prompt_partition=message.prompt_partition,
            prompt_offset=message.prompt_offset,
            content_hash=message.content_hash,
            first_offset=offset if known is None else known.first_offset,
            unexplained=[*(known.unexplained if known else ()), (message.attempt, message.incarnation)],
            finals=dict(known.finals) if known else {},
            earlier=() if known is None else _earlier(known),
        )
        return Ruling.HOLDS


def _earlier(known: RequestState) -> tuple[RequestState, ...]:
    """Return the attempts up to one that is outbid."""
    attempts, known.earlier = (*known.earlier, known), ()
    return attempts[-MAX_EARLIER:]
