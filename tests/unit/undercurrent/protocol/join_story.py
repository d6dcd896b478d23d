"""Logs of several points as engines write them, with all that goes wrong."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field, replace

from undercurrent.protocol.messages import (
    ActivationBlock,
    EndReason,
    PublisherStarted,
    StreamEnded,
    StreamInvalidated,
    StreamStarted,
)

POINTS = ("pa", "pb", "pc")
LAYERS = {"pa": (3,), "pb": (1, 4), "pc": (0,)}
WIDTH = {"pa": 2, "pb": 1, "pc": 1}
SECOND = 1_000_000


@dataclass
class Key:
    """A request's attempt, while its engine works on it."""

    request: str
    attempt: int
    index: int
    engine: str
    incarnation: int
    points: tuple[str, ...]
    made: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    seqs: dict[str, int] = field(default_factory=dict)
    revisions: dict[str, int] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)


class Story:
    """Engines write the logs of some points, with all that goes wrong; one lane per point and partition number."""

    def __init__(self, rng, points, numbers, steps):
        self.rng = rng
        self.points = points
        self.numbers = numbers
        self.logs = {(point, number): [] for point in points for number in range(numbers)}
        self.now = 100 * SECOND
        self.incarnations = {"e": 1, "z": 1}
        self.keys = []
        self.requests = 0
        self.attempts = Counter()
        for _ in range(steps):
            self.step()
        self.end_all()

    # --- writing

    def number(self, request):
        return int(request[1:]) % self.numbers

    def add(self, point, number, message):
        self.now += self.rng.randrange(2000)
        self.logs[point, number].append((self.now, message))

    def write(self, key, point, message):
        self.add(point, self.number(key.request), message)

    def shuffled(self, items):
        return self.rng.sample(list(items), len(items))

    def step(self):
        self.now += self.rng.choice([1000, SECOND, 20 * SECOND])
        roll = self.rng.random()
        if roll < 0.18 or not self.keys:
            self.start()
        elif roll < 0.75:
            self.rows(self.rng.choice(self.keys))
        elif roll < 0.86:
            self.end(self.rng.choice(self.keys))
        elif roll < 0.89:
            self.rewind(self.rng.choice(self.keys))
        elif roll < 0.92:
            self.foreign(self.rng.choice(self.keys))
        elif roll < 0.94:
            self.stray()
        elif roll < 0.97:
            self.hand_over(self.rng.choice(self.keys))
        else:
            self.restart(self.rng.choice("ez"))

    def start(self, request=None):
        if request is None:
            self.requests += 1
            request = f"r{self.requests}"
        self.attempts[request] += self.rng.choice([1, 1, 2])
        engine = self.rng.choice("ez")
        points = self.points if self.rng.random() < 0.85 else self.points[: self.rng.randint(1, len(self.points) - 1)]
        for index in range(self.rng.choice([1, 1, 1, 2])):
            key = Key(request, self.attempts[request], index, engine, self.incarnations[engine], points)
            # A crash in between leaves some points without a start; the engine comes back later.
            reached = self.shuffled(points)[: self.rng.choice([len(points)] * 6 + [1])]
            for point in reached:
                self.write(key, point, self.started(key, point))
                key.open.add(point)
            self.keys.append(key)
            if len(reached) < len(points):
                self.die(key.engine)
                return

    def started(self, key, point):
        key.sent[point], key.seqs[point], key.revisions[point] = 0, 1, 0
        return StreamStarted(
            request_id=key.request,
            attempt=key.attempt,
            index=key.index,
            point=point,
            engine=key.engine,
            incarnation=key.incarnation,
            seq=0,
            prompt_len=2,
            model="m",
            tensor_type="residual_stream",
            layers=LAYERS[point],
            width=WIDTH[point],
            dtype="float32",
            point_hash=point,
            points=key.points if key.points != self.points or self.rng.random() < 0.5 else (),
            started_at_us=0,
        )

    def rows(self, key, *, everything=False):
        key.made += self.rng.randint(0, 3)
        for point in self.shuffled(sorted(key.open)):
            while key.sent[point] < key.made and (everything or self.rng.random() < 0.6):
                first = key.sent[point]
                last = min(key.made, first + self.rng.randint(1, 4))
                key.sent[point] = last
                # Each point selects positions of its own, now and then; and a message may never come.
                chosen = [at for at in range(first, last) if self.rng.random() < 0.97]
                lost = self.rng.random() < 0.04
                key.seqs[point] += lost
                if chosen and not (lost and self.rng.random() < 0.5):
                    self.write(key, point, self.block(key, point, chosen))

    def block(self, key, point, chosen, **other):
        seq, key.seqs[point] = key.seqs[point], key.seqs[point] + 1
        tokens = [at + (self.rng.random() < 0.01) for at in chosen] if point != "pc" else []
        values = [value_of(point, at, column) for at in chosen for column in range(WIDTH[point] * len(LAYERS[point]))]
        return ActivationBlock(
            request_id=key.request,
            attempt=key.attempt,
            index=key.index,
            point=point,
            engine=other.get("engine", key.engine),
            incarnation=key.incarnation,
            tensor_type="residual_stream",
            dtype="float32",
            width=WIDTH[point],
            layers=LAYERS[point],
            seq=seq,
            revision=key.revisions[point],
            step=other.get("step", 0),
            captured_at_us=self.now,
            positions=struct.pack(f"<{len(chosen)}i", *chosen),
            token_ids=struct.pack(f"<{len(tokens)}i", *tokens),
            data=struct.pack(f"<{len(values)}f", *values),
        )

    def end(self, key, reason=EndReason.FINISHED):
        self.rows(key, everything=True)
        for point in self.shuffled(sorted(key.open)):
            self.write(key, point, self.ended(key, point, reason))
        self.keys.remove(key)

    def ended(self, key, point, reason):
        seq = key.seqs.get(point, 0)
        named = {"request_id": key.request, "attempt": key.attempt, "index": key.index, "point": point}
        return StreamEnded(
            **named,
            engine=key.engine,
            incarnation=key.incarnation,
            seq=seq,
            last_seq=seq,
            last_pos=-1,
            layers=LAYERS[point],
            emitted=(),
            dropped=(),
            reason=reason,
            ended_at_us=0,
        )

    # --- what goes wrong

    def rewind(self, key):
        for point in sorted(key.open):
            first = max(0, key.sent[point] - self.rng.randint(0, 2))
            key.sent[point] = first
            key.revisions[point] += 1
            seq, key.seqs[point] = key.seqs[point], key.seqs[point] + 1
            named = {"request_id": key.request, "attempt": key.attempt, "index": key.index, "point": point}
            who = {"engine": key.engine, "incarnation": key.incarnation}
            back = {"first_position": first, "revision": key.revisions[point], "invalidated_at_us": 0}
            self.write(key, point, StreamInvalidated(**named, **who, seq=seq, **back))

    def foreign(self, key):
        for point in sorted(key.open)[:1]:
            message = self.block(key, point, [99], engine="other")
            key.seqs[point] -= 1
            self.write(key, point, message)

    def stray(self):
        point, number = self.rng.choice(sorted(self.logs))
        nobody = Key(f"r{number}", 77, 0, "e", 1, self.points, seqs=dict.fromkeys(POINTS, 0))
        nobody.revisions = dict.fromkeys(POINTS, 0)
        self.add(point, number, self.rng.choice([None, self.block(nobody, point, [1])]))

    def hand_over(self, key):
        """Another attempt takes over; nobody may ever have ended the first one."""
        self.keys = [other for other in self.keys if other.request != key.request]
        self.start(key.request)

    def die(self, engine):
        """An engine is gone; somebody may end what it had, and it comes back."""
        gone = [key for key in self.keys if key.engine == engine]
        self.keys = [key for key in self.keys if key.engine != engine]
        for key in gone:
            roll = self.rng.random()
            if roll < 0.4:
                for point in self.shuffled(key.points):
                    self.write(key, point, replace(self.ended(key, point, EndReason.LOST), seq=0, engine="w"))
            elif roll < 0.6:
                self.keys = [other for other in self.keys if other.request != key.request]
                self.attempts[key.request] = max(self.attempts[key.request], key.attempt)
        self.restart(engine)

    def restart(self, engine):
        self.keys = [key for key in self.keys if key.engine != engine]
        self.incarnations[engine] += 1
        for point, number in self.shuffled(self.logs):
            message = PublisherStarted(engine=engine, incarnation=self.incarnations[engine], started_at_us=0)
            self.add(point, number, message)
            self.now += self.rng.choice([0, 0, SECOND])

    def end_all(self):
        for key in list(self.keys):
            if self.rng.random() < 0.7:
                self.end(key)
        for engine in "ez":
            self.restart(engine)
        self.now += 100 * SECOND
        for point, number in sorted(self.logs):
            self.add(point, number, None)


def value_of(point, position, column):
    return float(1000 * POINTS.index(point) + 10 * position + column)


def wide_row(points, position):
    values = [
        value_of(point, position, column) for point in points for column in range(WIDTH[point] * len(LAYERS[point]))
    ]
    return struct.pack(f"<{len(values)}f", *values)
