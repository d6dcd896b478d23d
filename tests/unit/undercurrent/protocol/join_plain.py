"""What must be said of the logs of several points, read in the plainest way."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field

from tests.unit.undercurrent.protocol.join_story import SECOND
from undercurrent.protocol.messages import EndReason, PublisherStarted, StreamEnded, StreamInvalidated, StreamStarted


@dataclass
class Seen:
    """A stream as one lane has it, once it was read to its end."""

    start: int
    at_us: int
    started: StreamStarted
    rows: dict[int, tuple[int, int | None, int]] = field(default_factory=dict)  # position: offset, token, clear mark
    doubt: list[int] = field(default_factory=list)  # positions, from each of which on nothing is clear
    next_seq: int = 1
    revision: int = 0
    missing: int = 0
    clear: int = -1
    rewound: int | None = None
    conflict: bool = False
    end: int | None = None
    reason: str = ""
    whole: bool = False

    @property
    def shown(self):
        return max(self.rows, default=-1)


class Lane:
    """Reads one lane once, in the plainest way."""

    def __init__(self, log):
        self.log = log
        self.dead = Counter()
        self.streams = []  # (name, Seen), as they opened
        self.live = {}
        for offset, (at_us, message) in enumerate(log):
            self.dead[offset] += not self.take(offset, at_us, message)

    def take(self, offset, at_us, message):
        if message is None:
            return False
        if isinstance(message, PublisherStarted):
            for name, seen in list(self.live.items()):
                if seen.started.engine == message.engine and seen.started.incarnation < message.incarnation:
                    self.close(name, offset, "lost")
            return True
        name = (message.request_id, message.attempt, message.index)
        if isinstance(message, StreamStarted):
            return self.start(name, offset, at_us, message)
        seen = self.live.get(name)
        if seen is None:
            return isinstance(message, StreamEnded)
        if isinstance(message, StreamEnded) and message.reason is EndReason.LOST:
            self.close(name, offset, "lost")
            return True
        if message.engine != seen.started.engine or message.incarnation != seen.started.incarnation:
            if not seen.conflict:
                seen.doubt.append(seen.shown + 1)
            seen.conflict = True
            return False
        return self.own(name, seen, offset, message)

    def start(self, name, offset, at_us, message):
        same = [other for other in self.live if other[0] == name[0]]
        if any(other[1] > name[1] for other in same) or name in self.live:
            return False
        for other in same:
            if other[1] < name[1]:
                self.close(other, offset, "superseded")
        self.live[name] = Seen(offset, at_us, message)
        self.streams.append((name, self.live[name]))
        return True

    def own(self, name, seen, offset, message):
        gap, seen.next_seq = message.seq - seen.next_seq, message.seq + 1
        seen.missing += gap
        if gap:
            seen.doubt.append(seen.shown + 1)
        if isinstance(message, StreamEnded):
            seen.whole = True
            self.close(name, offset, message.reason.value)
        elif isinstance(message, StreamInvalidated):
            seen.revision = message.revision
            if seen.shown >= message.first_position and seen.rewound is None:
                seen.rewound = message.first_position
        elif seen.rewound is None:
            count = len(message.positions) // 4
            tokens = struct.unpack(f"<{len(message.token_ids) // 4}i", message.token_ids) or (None,) * count
            for at, token in zip(struct.unpack(f"<{count}i", message.positions), tokens, strict=True):
                seen.rows[at] = offset, token, -1
        return True

    def close(self, name, offset, reason):
        seen = self.live.pop(name)
        seen.end = offset
        plain = reason == "finished" or seen.conflict
        fault = "conflict" if seen.conflict else "rewound" if seen.rewound is not None else ""
        seen.reason = fault if fault and plain else reason


@dataclass
class Gone:
    """What shows that no stream came at a point."""

    start: int
    reason: str


class Plain:
    """What must be said of one partition number, from the logs alone."""

    def __init__(self, points, logs):
        self.points = points
        self.lanes = [Lane(log) for log in logs]
        self.signals, self.results, self.rows, self.places = Counter(), Counter(), {}, []
        names = dict.fromkeys(name for lane in self.lanes for name, _ in lane.streams)
        for name in names:
            sides = [next((seen for other, seen in lane.streams if other == name), None) for lane in self.lanes]
            named = next(seen.started.points for seen in sides if seen)
            if not named or set(points) <= set(named):
                self.join(name, sides)

    def join(self, name, sides):
        found = [seen or self.gone(name, sides, side) for side, seen in enumerate(sides)]
        assert None not in found, f"nothing says that {name} will not come: {found}"
        self.places.append([(item.start, isinstance(item, Seen)) for item in found])
        real = [seen for seen in sides if seen is not None]
        joined, clear, unjoined = [], -1, len(real) < len(sides) and any(seen.rows for seen in real)
        clean = True
        for at in sorted({at for seen in real for at in seen.rows}) if len(real) == len(sides) else ():
            tokens = {seen.rows[at][1] for seen in real if at in seen.rows} - {None}
            if any(at not in seen.rows for seen in real) or len(tokens) > 1:
                unjoined, clean = True, False
                continue
            clean = clean and not any(at >= doubt for seen in real for doubt in seen.doubt)
            joined.append(at)
            clear = at if clean else clear
        for seen in real:
            clear = clear if seen.rewound is None else min(clear, seen.rewound - 1)
        self.rows[name] = joined
        if len(joined) > 2:
            self.signals[name, real[0].rows[joined[2]][0], joined[2]] += 1
        reason = next((item.reason for item in found if item.reason != "finished"), "finished")
        whole = len(real) == len(sides) and all(self.whole(seen) for seen in real)
        missing = sum(seen.missing for seen in real)
        said = found[0].end if sides[0] is not None else found[0].start
        self.results[name, said, len(joined), missing, whole and not unjoined, reason, clear] += 1

    def whole(self, seen):
        return seen.whole and not (seen.missing or seen.conflict or seen.rewound is not None)

    def gone(self, name, sides, side):
        """Return the first record of a lane that shows that a stream will not come there."""
        found = []
        request, attempt, _ = name
        for at, seen in enumerate(sides):
            if seen is None:
                continue
            there = self.lanes[at]
            for other, mine in self.lanes[side].streams:
                if other[0] == request and other[1] > attempt:
                    partner = next((item for key, item in there.streams if key == other), None)
                    if partner is None or partner.start > seen.start:
                        found.append((mine.start, "superseded"))
            for offset, (at_us, message) in enumerate(self.lanes[side].log):
                if isinstance(message, PublisherStarted) and message.engine == seen.started.engine:
                    if message.incarnation > seen.started.incarnation and not self.before(there, seen.start, message):
                        found.append((offset, "lost"))
                elif isinstance(message, StreamEnded) and name == (message.request_id, message.attempt, message.index):
                    found.append((offset, message.reason.value))
                if at_us // (60 * SECOND) >= seen.at_us // (60 * SECOND) + 11:
                    found.append((offset, "lost"))
        return Gone(*min(found)) if found else None

    def before(self, lane, offset, message):
        """Whether a lane had an engine's start, or a later one, before an offset."""
        starts = [item for _, item in lane.log[:offset] if isinstance(item, PublisherStarted)]
        return any(item.engine == message.engine and item.incarnation >= message.incarnation for item in starts)
