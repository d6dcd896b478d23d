"""A log in memory that a producer can write to and read from, and an engine worker's hand to answer with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import Any

from undercurrent.codec.avro import Codec
from undercurrent.kafka.events import PartitionEvent, PartitionProblem
from undercurrent.kafka.publisher import Delivery, DeliveryError, OnDelivery
from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.messages import (
    Accepted,
    GenerationEvent,
    GenerationKind,
    Message,
    Outcome,
    PromptRequest,
    Released,
    ReleaseReason,
)

CODEC = Codec()
PROMPTS = "undercurrent.prompts"
GENERATIONS = "undercurrent.generations"


class Log:
    """Partitions of records. `on_idle` runs whenever a reader finds nothing: there a test moves the world on."""

    def __init__(self, partitions: int = 4, answers: int | None = None) -> None:
        self.counts = {PROMPTS: partitions, GENERATIONS: partitions if answers is None else answers}
        self.records: dict[Partition, list[Record]] = defaultdict(list)
        self.refuse: Callable[[bytes], DeliveryError | None] = lambda key: None
        self.fail: Callable[[bytes], DeliveryError | None] = lambda key: None
        self.on_idle: Callable[[], None] = lambda: None
        self.retained: dict[Partition, int] = {}
        self.acknowledge = True

    def append(self, topic: str, partition: int, key: bytes, value: bytes) -> int:
        where = Partition(topic, partition)
        offset = len(self.records[where])
        self.records[where].append(Record(topic, partition, offset, key, value, 0, ()))
        return offset

    def prompts(self) -> list[tuple[Record, PromptRequest]]:
        found = []
        for where, records in self.records.items():
            if where.topic == PROMPTS:
                for record in records:
                    message = CODEC.decode(record.value)
                    assert isinstance(message, PromptRequest)
                    found.append((record, message))
        return found


class Connection:
    """A producer's clients on a `Log`."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.writer = _Writer(log)
        self.lookup = _Lookup(log)
        self.readers: list[_Reader] = []

    def reader(self, starts: Mapping[tuple[str, int], int]) -> _Reader:
        self.readers.append(_Reader(self.log, starts))
        return self.readers[-1]


class _Writer:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._waiting: list[tuple[OnDelivery, Delivery]] = []
        self.closed = False

    def produce(
        self, topic: str, value: bytes, *, key: bytes, partition: int, on_delivery: OnDelivery
    ) -> DeliveryError | None:
        refused = self._log.refuse(key)
        if refused is not None:
            return refused
        error = self._log.fail(key)
        offset = -1 if error else self._log.append(topic, partition, key, value)
        self._waiting.append((on_delivery, Delivery(topic, partition, offset, error)))
        return None

    def poll(self, timeout_s: float = 0.0) -> int:
        if not self._log.acknowledge:
            return 0
        waiting, self._waiting = self._waiting, []
        for on_delivery, delivery in waiting:
            on_delivery(delivery)
        return len(waiting)

    def close(self, timeout_s: float = 5.0) -> int:
        self.poll()
        self.closed = True
        return 0


class _Lookup:
    def __init__(self, log: Log) -> None:
        self._log = log

    def partitions(self, topic: str) -> list[Partition]:
        return [Partition(topic, number) for number in range(self._log.counts[topic])]

    def beginning(self, partitions: Collection[tuple[str, int]]) -> dict[Partition, int]:
        return {Partition(*where): self._log.retained.get(Partition(*where), 0) for where in partitions}

    def end(self, partitions: Collection[tuple[str, int]]) -> dict[Partition, int]:
        return {Partition(*where): len(self._log.records[Partition(*where)]) for where in partitions}


class _Reader:
    def __init__(self, log: Log, starts: Mapping[tuple[str, int], int]) -> None:
        self._log = log
        self.positions = {Partition(*where): offset for where, offset in starts.items()}
        self._events: list[PartitionEvent] = []
        self.closed = False

    def poll_batch(self, max_records: int, timeout_s: float) -> list[Record]:
        found: list[Record] = []
        for where, position in self.positions.items():
            if position < self._log.retained.get(where, 0):
                event = PartitionEvent(where, PartitionProblem.OUT_OF_RANGE, "_AUTO_OFFSET_RESET", "gone", position)
                self._events.append(event)
                continue
            found += self._log.records[where][position:]
            self.positions[where] = len(self._log.records[where])
        if not found:
            self._log.on_idle()
        return found[:max_records]

    def add(self, partition: tuple[str, int], offset: int) -> None:
        self.positions[Partition(*partition)] = offset

    def take_events(self) -> list[PartitionEvent]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self.closed = True


class Worker:
    """Writes what an engine worker writes about one request."""

    def __init__(self, log: Log, record: Record, *, incarnation: int = 7) -> None:
        self._log = log
        self._record = record
        self._request_id = (record.key or b"").decode()
        self._incarnation = incarnation
        self._times = count(1)

    def accept(self, attempt: int = 1, n: int = 1) -> None:
        self._write(
            Accepted(
                **self._common(attempt),
                epoch=attempt,
                content_hash=b"",
                points=(),
                stream_partition=0,
                n=n,
                accepted_at_us=next(self._times),
            )
        )

    def release(self, attempt: int = 1) -> None:
        self._write(Released(**self._common(attempt), reason=ReleaseReason.SHUTDOWN, released_at_us=next(self._times)))

    def tokens(self, text: str, attempt: int = 1, index: int = 0) -> None:
        self.event(GenerationKind.TOKENS, attempt, index=index, text=text)

    def final(self, text: str = "", attempt: int = 1, index: int = 0, **fields: Any) -> None:
        fields.setdefault("outcome", Outcome.COMPLETED)
        self.event(GenerationKind.FINAL, attempt, index=index, text=text, **fields)

    def event(self, kind: GenerationKind, attempt: int = 1, **fields: Any) -> None:
        self._write(GenerationEvent(**self._common(attempt), kind=kind, emitted_at_us=next(self._times), **fields))

    def _common(self, attempt: int) -> dict[str, Any]:
        return {
            "request_id": self._request_id,
            "attempt": attempt,
            "engine": "engine-0",
            "incarnation": self._incarnation,
            "prompt_partition": self._record.partition,
            "prompt_offset": self._record.offset,
        }

    def _write(self, message: Message) -> None:
        self._log.append(GENERATIONS, self._record.partition, self._request_id.encode(), CODEC.encode(message))
