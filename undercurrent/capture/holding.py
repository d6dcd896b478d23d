"""Between the ring and its reader: rows wait until the driver has seen their tokens, and none past the last one leaves.

    holding = Holding(ring.lengths, max_bytes=32 << 20, blocking={"p"})
    for content in holding.read(reader):     # what waited and may go now, then what the ring holds
        use(content)
    reader.release()

A row of position p may go when more than p tokens of its request are known (`lengths`), or when p lies in the prompt.
What may not go yet is copied and waits, and with it whatever else comes of its stream. When the last length is known,
rows at and past it are gone: they are no rows of this request, so they are neither numbered nor counted, and the counts
of `Close` are put right. Streams without a slot pass at once.

While anything waits, lengths are read once per `read`: within one reading of the ring the answer for a position does
not change, so positions that grow, as a stream's do, cannot overtake each other. A frame of which everything may go
costs one comparison of arrays, however many rows it has.

Of a position that counts from the end all rows that may be meant come together (`tails`); they wait for the last
length, and the one that it names goes.

What waits is bounded. Beyond `max_bytes` a point with `overflow: block` stops the reading (`full`); rows of others
are lost, and declared with the reason `unconfirmed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from undercurrent.capture.frames import Close, Content, Drop, Loss, Open, Rewind, Step, decode
from undercurrent.capture.lengths import Limits, Words
from undercurrent.capture.parts import Positions, copy_of, joined, part_of, positions_of, rows_below
from undercurrent.capture.selectors import Tail
from undercurrent.capture.sides import RingReader

UNCONFIRMED = "unconfirmed"

_KNOWN_PLANS = 256


@dataclass(slots=True)
class _Stream:
    """One open stream.

    Args:
        number: of the stream.
        at: its place in the arrays.
        alone: somebody says how long it is, and it has one shard: the shards of a stream count its rewinds alike.
        blocks: its point waits rather than lose a row.
        waiting: contents of it that wait.
        last_waiting: the latest of them.
        cut: rows that were past the end.
        lost: rows that were given up here.
        unlost: rows that the capture side declared lost, and that were past the end.
        tail: its position, where that counts from the end and somebody says where that is.
        prompt_len: tokens of its prompt.
        cached_prefix: positions below this have no row.
    """

    number: int
    at: int
    alone: bool
    blocks: bool
    waiting: int = 0
    last_waiting: _Waiting | None = None
    cut: int = 0
    lost: int = 0
    unlost: int = 0
    tail: Tail | None = None
    prompt_len: int = 0
    cached_prefix: int = 0


@dataclass(slots=True)
class _Waiting:
    """What waits: rows of some streams, or a loss, a rewind or the end of one.

    Args:
        content: a copy.
        streams: it concerns.
        owners: place of each row's stream [rows]; of steps alone.
        reason: of a loss.
    """

    content: Step | Loss | Close | Rewind
    streams: Sequence[_Stream]
    owners: Words | None = None
    reason: str = ""


class Holding:
    """See the module; one thread.

    Args:
        lengths: `Ring.lengths`.
        max_bytes: of rows that wait.
        blocking: points that wait rather than lose a row; None for all.
    """

    def __init__(self, lengths: memoryview, *, max_bytes: int, blocking: Collection[str] | None = ()) -> None:
        self._known = Limits(lengths)
        self._strangers = self._known.add(-1, 0)
        self._max_bytes = max_bytes
        self._blocking = None if blocking is None else frozenset(blocking)
        self._streams: dict[int, _Stream] = {}
        self._by_place: dict[int, _Stream] = {}
        self._tails: dict[int, _Stream] = {}
        self._lasts = np.zeros(len(self._known.limits), np.int64)
        self._plans: dict[int, tuple[Words, Words, Words]] = {}
        self._queue: list[_Waiting] = []
        self._held: dict[int, _Stream] = {}
        self.full = False
        self.held_bytes = 0
        self.past_end = 0

    @property
    def waiting(self) -> int:
        """Contents that wait."""
        return len(self._queue)

    def hurry(self) -> None:
        """Let nothing stop the reading any more: what is beyond the bound is lost, and declared."""
        self._blocking, self.full = frozenset(), False
        for stream in self._streams.values():
            stream.blocks = False

    def read(self, reader: RingReader, enough: Callable[[], bool] = lambda: False) -> Iterator[Content]:
        """Yield what waited and may go now, then what may go of the ring's frames. To be consumed to its end.

        Args:
            reader: of the ring.
            enough: asked after each frame; the rest stays in the ring.

        Raises:
            RingError: the ring cannot be trusted any more.
        """
        yield from self._begin()
        if self.full:
            return
        for frame in reader.read():
            yield from self.take(decode(frame))
            if self.full or enough():
                return

    def _begin(self) -> Iterator[Content]:
        if not self._queue:
            return
        new = self._known.look()
        if not new.take(list(self._held)).any():
            return
        for waiting in self._emptied():
            content, (stream, *_) = waiting.content, waiting.streams
            match content:
                case Step():
                    assert waiting.owners is not None  # noqa: S101 - a step has them
                    yield from (self._sort if stream.tail is None else self._pick)(content, waiting.owners, copied=True)
                case Loss():
                    yield from self._lose(stream, content, waiting.reason)
                case Close():
                    yield from self._end(stream, content)
                case Rewind():
                    yield from self._rewind(stream, content)

    def _emptied(self) -> list[_Waiting]:
        """Return everything that waits, as if it had just come."""
        queue, self._queue = self._queue, []
        self.full, self.held_bytes = False, 0
        for stream in self._held.values():
            stream.waiting, stream.last_waiting = 0, None
        self._held.clear()
        return queue

    def take(self, content: Content) -> Sequence[Content]:
        """Return what may go of a frame's content, and keep a copy of the rest.

        Args:
            content: as it stands in the ring; what is said of a stream that was never opened here passes.
        """
        match content:
            case Step():
                return self._take_step(content)
            case Open():
                self._open(content)
            case Close() | Rewind():
                stream = self._streams.get(content.stream)
                if stream is not None:
                    return tuple(
                        self._end(stream, content) if isinstance(content, Close) else self._rewind(stream, content)
                    )
            case Drop() if self._known.slots:
                return [drop for loss in content.losses for drop in self._take_loss(loss, content)]
        return (content,)

    def _take_loss(self, loss: Loss, drop: Drop) -> Iterator[Drop]:
        stream = self._streams.get(loss.stream)
        if stream is None:
            yield replace(drop, losses=(loss,))
        else:
            yield from self._lose(stream, loss, drop.reason)

    def _open(self, opened: Open) -> None:
        at = self._known.add(opened.slot, opened.prompt_len)
        blocks = self._blocking is None or opened.point in self._blocking
        stream = _Stream(opened.stream, at, opened.slot >= 0 and opened.shards == 1, blocks)
        self._streams[opened.stream] = self._by_place[at] = stream
        if opened.tail and opened.slot >= 0:
            stream.tail = Tail.at(*opened.tail)
            stream.prompt_len, stream.cached_prefix = opened.prompt_len, opened.cached_prefix
            self._tails[at] = stream
        if len(self._lasts) < len(self._known.limits):
            self._lasts = np.resize(self._lasts, len(self._known.limits))
        self._lasts[at] = -1

    def _take_step(self, step: Step) -> Sequence[Content]:
        if not self._known.slots:
            return (step,)
        owners, entries, ones = self._plans.get(step.plan) or self._plan(step)
        if self._tails and int(owners[0]) in self._tails:
            if not self._queue:
                self._known.look()
            return tuple(self._pick(step, owners))
        positions = positions_of(step)
        if not self._queue:
            # Nothing waits that newer lengths could let overtake.
            if self._known.all_real(entries, ones, positions):
                self._lasts[owners] = positions
                return (step,)
            self._known.look()
        return tuple(self._sort(step, owners))

    def _plan(self, step: Step) -> tuple[Words, Words, Words]:
        streams, counts = step.table()
        known = [self._streams.get(number) for number in streams]
        owners: Words = np.repeat([self._strangers if stream is None else stream.at for stream in known], counts)
        if len(self._plans) >= _KNOWN_PLANS:
            self._plans.clear()
        plan = self._plans[step.plan] = (owners, *self._known.words_of(owners))
        return plan

    def _sort(self, step: Step, owners: Words, *, copied: bool = False) -> Iterator[Content]:
        """Yield the rows of a step that may go, keep those that wait, and forget or declare those that never will."""
        known, positions = self._known, positions_of(step)
        late = positions >= known.limits.take(owners)
        never = late & (known.final | known.gone).take(owners)
        real, waits = ~late, late & ~never
        if real.any():
            self._lasts[owners[real]] = positions[real]
            yield step if real.all() else part_of(step, real)
        if waits.any():
            part = part_of(step, waits) if not waits.all() else step if copied else copy_of(step)
            yield from self._keep(part, owners[waits])
        if never.any():
            for stream, loss in self._losses(positions[never], owners[never]):
                yield from self._lose(stream, loss, UNCONFIRMED)

    def _pick(self, step: Step, owners: Words, *, copied: bool = False) -> Iterator[Content]:
        """Yield the row that a stream's position names; keep all that it may name until the last length is known."""
        at = int(owners[0])
        if not (self._known.final[at] or self._known.gone[at]):
            yield from self._keep(step if copied else copy_of(step), owners)
            return
        named = self._named(self._tails[at])
        meant = positions_of(step) == named
        self._tails[at].cut += int((~meant).sum())
        if meant.any():
            self._lasts[at] = named
            yield part_of(step, meant)

    def _named(self, stream: _Stream) -> int:
        """Return the position that a stream's selector names by its last length, -1 for none or where that is gone."""
        if stream.tail is None or not self._known.final[stream.at]:
            return -1
        return stream.tail.position(stream.prompt_len, int(self._known.limits[stream.at]))

    def _keep(self, part: Step, owners: Words) -> Iterator[Content]:
        streams = [self._by_place[at] for at in np.unique(owners).tolist()]
        if self.held_bytes >= self._max_bytes:
            if not streams[0].blocks:
                for stream, loss in self._losses(positions_of(part), owners):
                    yield from self._lose(stream, loss, UNCONFIRMED)
                return
            self.full = True
        self._wait(_Waiting(part, streams, owners))

    def _losses(self, positions: Positions, owners: Words) -> Iterator[tuple[_Stream, Loss]]:
        for at in np.unique(owners).tolist():
            stream, mine = self._by_place[at], positions[owners == at]
            loss = Loss(
                stream=stream.number, messages=1, rows=len(mine), first_pos=int(mine[0]), last_pos=int(mine[-1])
            )
            yield stream, loss

    def _lose(self, stream: _Stream, loss: Loss, reason: str) -> Iterator[Drop]:
        """Yield a loss, or what of it is wanted and lies before the end, or keep it until that is known."""
        limit, rows = int(self._known.limits[stream.at]), loss.rows
        # Of the rows that a position from the end may mean, all of them before that end, one is wanted.
        if (stream.tail is not None or loss.last_pos >= limit) and not self._known.gone[stream.at]:
            if not self._known.final[stream.at]:
                self._wait(_Waiting(loss, (stream,), reason=reason))
                return
            if stream.tail is not None:
                rows, loss = self._named_of(stream, loss)
            else:
                rows = rows_below(loss, limit)
                self.past_end += loss.rows - rows
                loss = replace(loss, last_pos=limit - 1)
        self._never_was(stream, loss.rows - rows, reason)
        stream.lost += rows if reason == UNCONFIRMED else 0
        if rows:
            yield Drop(reason=reason, losses=(replace(loss, rows=rows),))

    def _named_of(self, stream: _Stream, loss: Loss) -> tuple[int, Loss]:
        """Return how many rows of a loss a stream's position names, and that loss."""
        named = self._named(stream)
        is_lost = loss.first_pos <= named <= loss.last_pos and self._lasts[stream.at] != named
        return (1, replace(loss, messages=1, first_pos=named, last_pos=named)) if is_lost else (0, loss)

    @staticmethod
    def _never_was(stream: _Stream, rows: int, reason: str) -> None:
        """Note rows that count neither as captured nor as lost, whoever lost them."""
        if reason == UNCONFIRMED:
            stream.cut += rows
        else:
            stream.unlost += rows

    def _end(self, stream: _Stream, closed: Close) -> Iterator[Content]:
        if stream.waiting:
            self._wait(_Waiting(closed, (stream,)))
            return
        yield from self._missing(stream, closed)
        self._tails.pop(stream.at, None)
        del self._streams[stream.number], self._by_place[stream.at]
        self._known.remove(stream.at)
        if stream.cut or stream.lost or stream.unlost:
            closed = replace(
                closed,
                emitted=closed.emitted - stream.cut - stream.lost,
                dropped=closed.dropped + stream.lost - stream.unlost,
                last_pos=int(self._lasts[stream.at]),
            )
        yield closed

    def _missing(self, stream: _Stream, closed: Close) -> Iterator[Drop]:
        """Declare that the row of a position that counts from the end never came, or that nobody knows which it was."""
        named, gone = self._named(stream), bool(self._known.gone[stream.at])
        came = self._lasts[stream.at] >= 0 or closed.dropped > stream.unlost or stream.lost
        if stream.tail is None or closed.reason != "finished" or came:
            return
        if named >= stream.cached_prefix or (gone and closed.emitted):
            stream.lost, stream.cut = stream.lost + 1, stream.cut - 1
            position = named if named >= 0 else closed.last_pos
            loss = Loss(stream=stream.number, messages=1, rows=1, first_pos=position, last_pos=position)
            yield Drop(reason=UNCONFIRMED, losses=(loss,), dropped_at_us=closed.closed_at_us)

    def _rewind(self, stream: _Stream, rewind: Rewind) -> Iterator[Rewind]:
        """Forget what waits and is void by now; yield the rewind if something has gone out that is."""
        full = self.full
        for waiting in self._emptied() if stream.waiting else ():
            content, owners = waiting.content, waiting.owners
            if isinstance(content, Step) and owners is not None and stream in waiting.streams:
                valid = (owners != stream.at) | (positions_of(content) < rewind.first_pos)
                stream.cut += int((~valid).sum())
                if valid.any():
                    self._wait_rows(part_of(content, valid), owners[valid])
            elif isinstance(content, Loss) and stream in waiting.streams and content.last_pos >= rewind.first_pos:
                rows = rows_below(content, rewind.first_pos)
                self._never_was(stream, content.rows - rows, waiting.reason)
                if rows:
                    valid_loss = replace(content, rows=rows, last_pos=rewind.first_pos - 1)
                    self._wait(_Waiting(valid_loss, (stream,), reason=waiting.reason))
            else:
                self._wait(waiting)
        self.full = full
        if stream.alone and self._lasts[stream.at] < rewind.first_pos:
            return
        if stream.waiting:
            self._wait(_Waiting(rewind, (stream,)))
        else:
            self._lasts[stream.at] = rewind.first_pos - 1
            yield rewind

    def _wait_rows(self, part: Step, owners: Words) -> None:
        self._wait(_Waiting(part, [self._by_place[at] for at in np.unique(owners).tolist()], owners))

    def _wait(self, waiting: _Waiting) -> None:
        if isinstance(waiting.content, Step):
            self.held_bytes += len(waiting.content.payload)
        elif isinstance(waiting.content, Loss):
            before = waiting.streams[0].last_waiting
            if before is not None and isinstance(before.content, Loss) and before.reason == waiting.reason:
                both = joined(before.content, waiting.content)
                if both is not None:
                    before.content = both
                    return
        self._queue.append(waiting)
        for stream in waiting.streams:
            stream.waiting += 1
            stream.last_waiting = waiting
            self._held[stream.at] = stream
