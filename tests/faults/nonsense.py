"""Nonsense on every topic that engine workers sweep, and what of it lies in the dead-letter topics."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from undercurrent.codec import Codec
from undercurrent.protocol.dead_letters import Place, origin, said_of
from undercurrent.protocol.messages import (
    CommandKind,
    CommandSource,
    ControlCommand,
    PromptRequest,
    Sampling,
)
from undercurrent.testing.engine_bench import EngineBench

CODEC = Codec()
KEY = b"nonsense"
PROMPT = PromptRequest(request_id="nonsense", prompt="x", sampling=Sampling(), created_at_us=0)
COMMAND = ControlCommand(
    command_id="c", kind=CommandKind.ABORT, request_id="nonsense", source=CommandSource.OPERATOR, issued_at_us=0
)


def nonsense(rng: random.Random, *, tombstone: bool) -> Iterator[bytes | None]:
    """Yield the bytes of 20 records of which no topic takes any."""
    good = CODEC.encode(replace(COMMAND, reason="r" * 40))
    yield b""
    yield None if tombstone else b"\0"
    yield CODEC.encode(PROMPT)  # readable, and at home elsewhere
    yield good[:1]
    yield good[:9]  # a frame without all of its fingerprint
    yield good[:10]  # and without a body
    yield good[:-1]
    yield good[: len(good) // 2]
    yield good + b"\0"
    yield good * 2
    yield b"\xc3\x02" + good[2:]
    yield b"\xc3\x01" + rng.randbytes(8) + good[10:]
    yield b"\0" + rng.randbytes(4) + good[10:]  # framed for a registry that is not there
    yield good[10:]
    yield good[:10] + b"\xff" * 12  # a length that no memory holds
    yield rng.randbytes(1)
    yield rng.randbytes(300)
    yield b'{"kind": "abort"}'
    yield "nicht lesbar: \u00fc".encode("utf-16")
    yield rng.randbytes(200_000)


class Planted:
    """What was planted in the topics of a bench, and what of it lies in their dead-letter topics."""

    def __init__(self, bench: EngineBench, seed: int) -> None:
        self._bench = bench
        self._rng = random.Random(seed)
        self._takes_back = {bench.plan.labels, bench.plan.probe_state}
        self.records: dict[Place, bytes | None] = {}

    def plant(self) -> None:
        """Write 20 records to each topic, in turn to each of its partitions."""
        counts = {topic.name: topic.partitions for topic in self._bench.plan.topics()}
        for topic in self._bench.plan.swept:
            for at, value in enumerate(nonsense(self._rng, tombstone=topic not in self._takes_back)):
                number = at % counts[topic]
                offset = self._bench.write(topic, number, KEY, value)
                self.records[Place(topic, number, offset)] = value

    def letters(self) -> Counter[Place]:
        """Return how often each record is a dead letter; its bytes, key and cause are checked."""
        found: Counter[Place] = Counter()
        for topic in self._bench.plan.swept:
            for record in self._bench.read(self._bench.plan.dlq(topic)):
                place, said = origin(record.headers), said_of(record.headers)
                assert place is not None
                assert (place.topic, place.partition) == (topic, record.partition)
                assert (record.key, record.value or b"") == (KEY, self.records[place] or b"")
                assert (said["cause"], said["service"][:7]) == ("undecodable", "engine-")
                assert said["detail"]
                found[place] += 1
        return found

    def wait(self, topics: Collection[str] | None = None) -> None:
        """Wait until each record, or each of some topics, is a dead letter; none is so twice, and no other one."""
        wanted = [place for place in self.records if topics is None or place.topic in topics]
        self._bench.wait(lambda: self.letters().keys() >= set(wanted), f"{len(wanted)} letters", 120.0)
        assert self.letters() == Counter(dict.fromkeys(wanted, 1))
