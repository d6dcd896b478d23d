"""The sweeper against partitions and transactions in memory, where everything that may fail does, at random."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine_worker.sweeper import Sweeper
from engine_worker.unreadable import Judge
from undercurrent.codec import Codec
from undercurrent.errors import (
    AbortableTransactionError,
    CommitError,
    RetriableTransactionError,
    StrandedError,
    UnreachableError,
)
from undercurrent.kafka.aftermath import Logs
from undercurrent.kafka.records import Partition, Record
from undercurrent.kafka.subscriber import CommitResult
from undercurrent.protocol.dead_letters import origin
from undercurrent.protocol.messages import EngineStarted
from undercurrent.service.health import Heartbeat
from undercurrent.testing.waiting import wait_until
from undercurrent.topics import TopicPlan

PLAN = TopicPlan(prefix="t", prompt_partitions=2)
GOOD = Codec().encode(EngineStarted(engine="e", host="h", pid=1, version="1", started_at_us=1))
LOGS = Logs(
    partitions=[(PLAN.dlq(topic), number) for topic in PLAN.swept for number in (0, 1)],
    key=b"",
    value=b"",
    beside=(PLAN.prompts, 0),
)
WHERES = (Partition(PLAN.acks, 0), Partition(PLAN.control, 0), Partition(PLAN.generations, 1))


@dataclass
class World:
    """Logs, what the group has committed, and the dead letters; `chance` of a failure at each step.

    Attributes:
        late: commits without a transaction that have not arrived, with whom they belong to.
        forgotten: the letters and offsets of a transaction that its broker forgot, by the id of its writer.
    """

    seed: int
    chance: float
    logs: dict[Partition, list[bytes]] = field(default_factory=dict)
    committed: dict[Partition, int] = field(default_factory=dict)
    letters: Counter[Any] = field(default_factory=Counter)
    late: list[tuple[int, dict[Partition, int]]] = field(default_factory=list)
    forgotten: dict[str, tuple[list[Any], dict[Partition, int]]] = field(default_factory=dict)
    lost: int = 0  # how many were forgotten
    generation: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        for where in WHERES:
            # A topic takes what is at home there: elsewhere the good one is as bad as nonsense.
            self.logs[where] = [GOOD if self.rng.random() < 0.8 else b"?" for _ in range(400)]
        self.expected = {
            (*where, at)
            for where, values in self.logs.items()
            for at, value in enumerate(values)
            if value == b"?" or where.topic != PLAN.acks
        }

    def fails(self, share: float = 1.0) -> bool:
        failed = self.rng.random() < self.chance * share
        self.failures += failed
        return failed


class FakeSubscriber:
    """A member that gets, and loses, partitions."""

    group_id = "letters"

    def __init__(self, world: World, handler: Any) -> None:
        self._world, self._handler = world, handler
        self._at: dict[Partition, int | None] = {}
        self._results: list[CommitResult] = []

    def __enter__(self) -> FakeSubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self._handler.on_revoked(list(self._at))

    @property
    def assigned(self) -> frozenset[Partition]:
        return frozenset(self._at)

    def poll_batch(self, most: int, _: float) -> list[Record]:
        world = self._world
        if world.fails(0.2):
            raise UnreachableError("scripted")
        if len(self._at) < len(WHERES) or world.fails():
            world.generation += 1
            gone = [where for where in self._at if world.rng.random() < 0.7]
            world.rng.choice([self._handler.on_revoked, self._handler.on_lost])(gone)
            self._at = dict.fromkeys(WHERES, None) | {w: a for w, a in self._at.items() if w not in gone}
            self._handler.on_assigned([where for where, at in self._at.items() if at is None])
        self._arrive()
        found: list[Record] = []
        for where, at in self._at.items():
            if at is not None:
                values = world.logs[where][at : at + world.rng.randint(0, most // 4)]
                found += [Record(*where, at + n, b"k", value, 0, ()) for n, value in enumerate(values)]
                self._at[where] = at + len(values)
        return found

    def _arrive(self) -> None:
        while self._world.late and self._world.rng.random() < 0.3:
            generation, offsets = self._world.late.pop(0)
            error = None if generation == self._world.generation else "scripted"
            if error is None:
                self._world.committed |= offsets
            self._results.append(CommitResult(offsets, error, True))

    def start(self, where: Partition, offset: int) -> bool:
        if where in self._at:
            self._at[where] = offset
        return where in self._at

    def committed(self, wheres: list[Partition], _: float) -> dict[Partition, tuple[int | None, str | None]]:
        unknown = {where for _, offsets in self._world.forgotten.values() for where in offsets}
        known = [where for where in wheres if where not in unknown and not self._world.fails()]
        return {where: (self._world.committed.get(where), None) for where in known}

    def commit(self, offsets: dict[Partition, tuple[int, None]]) -> dict[Partition, int]:
        if self._world.fails():
            raise CommitError("scripted", retriable=True)
        sent = {where: offset for where, (offset, _) in offsets.items() if where in self._at}
        if sent:
            self._world.late.append((self._world.generation, sent))
        return sent

    def take_commit_results(self) -> list[CommitResult]:
        results, self._results = self._results, []
        return results

    def take_events(self) -> list[Any]:
        return []

    def consumer_group_metadata(self) -> int:
        return self._world.generation


class FakeWriter:
    """Transactions that fail before, at and behind their commit, or are forgotten by their broker."""

    def __init__(self, world: World, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self._world = world
        self._letters: list[Any] = []
        self._offsets: dict[Partition, int] = {}
        self._logs: set[tuple[str, int]] = set()

    def init(self, _: float) -> None:
        if self._world.fails():
            raise UnreachableError("scripted")

    def begin(self) -> None:
        self._letters, self._offsets, self._logs = [], {}, set()

    def produce(self, topic: str, value: bytes | None, *, key: bytes, partition: int, headers: Any = ()) -> None:
        if self._world.fails(0.05):
            raise AbortableTransactionError("scripted")
        self._logs.add((topic, partition))
        if not headers:
            return
        place = origin(headers)
        assert place is not None
        assert (topic, partition) == (PLAN.dlq(place.topic), place.partition)
        self._letters.append(tuple(place))

    def send_offsets(self, offsets: dict[Partition, tuple[int, None]], metadata: int) -> None:
        if self._world.fails():
            raise RetriableTransactionError("scripted")
        if metadata != self._world.generation or self._world.fails():
            raise AbortableTransactionError("scripted")
        self._offsets = {where: offset for where, (offset, _) in offsets.items()}

    def flush(self) -> None:
        if self._world.fails():
            raise RetriableTransactionError("scripted")

    def abort(self) -> None:
        if self._world.fails():
            raise RetriableTransactionError("scripted")
        # Each log ends what is open in it.
        if self._logs >= set(LOGS.partitions) and self._offsets == {LOGS.beside: 0}:
            self._world.forgotten.pop(self.transactional_id, None)

    def commit(self) -> None:
        if self._world.fails():
            raise AbortableTransactionError("scripted")
        assert self.transactional_id not in self._world.forgotten, "half of what was forgotten would be committed"
        if self._world.fails():
            self._world.forgotten[self.transactional_id] = self._letters, self._offsets
            self._world.lost += 1
            raise StrandedError("scripted: its broker was killed, and knows it no more")
        self._world.letters.update(self._letters)
        self._world.committed |= self._offsets
        if self._world.fails():
            raise StrandedError("scripted: it was committed, and nobody knows")

    def close(self, _: float) -> None:
        pass


def sweeper(world: World, counted: list[str], identity: str = "letters.0") -> Sweeper:
    return Sweeper(
        make_subscriber=lambda handler: FakeSubscriber(world, handler),  # type: ignore[arg-type,return-value]
        make_writer=lambda: FakeWriter(world, identity),  # type: ignore[arg-type,return-value]
        lookup=FakeLookup(),  # type: ignore[arg-type]
        logs=lambda: LOGS,
        judge=Judge(PLAN, Codec(), "engine-0"),
        dead_letters=PLAN.dlq,
        count=counted.append,
        heartbeat=Heartbeat("letters", 60.0),
        commit_s=0.0,
        again_s=0.0,
    )


class FakeLookup:
    def beginning(self, wheres: list[Partition]) -> dict[Partition, int]:
        return dict.fromkeys(wheres, 0)


@pytest.mark.parametrize("seed", range(6))
def test_each_unreadable_record_is_a_letter_once_whatever_fails(seed: int) -> None:
    world, counted = World(seed, 0.0 if seed == 0 else 0.1), list[str]()
    made = sweeper(world, counted)
    made.start()
    try:
        wait_until(lambda: world.letters.keys() >= world.expected, 60.0, f"{len(world.expected)} letters")
        ends = {where: len(values) for where, values in world.logs.items()}
        wait_until(lambda: world.committed == ends, 60.0, "everything to be committed")
    finally:
        made.stop(10.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "letters"]
    assert world.letters == Counter(dict.fromkeys(world.expected, 1))
    assert (world.failures > 20) is (world.lost > 0) is (seed > 0)
    assert not world.forgotten
    assert set(counted) == {where.topic for where in WHERES}
