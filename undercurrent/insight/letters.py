"""Dead letters of a pipeline: read, and written back where they came from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from undercurrent.errors import CodecError, ConfigError, DecodeError, TopicError, UnreachableError
from undercurrent.insight.reading import Pipeline, Progress, Span
from undercurrent.kafka.publisher import Delivery, HeaderList, Publisher
from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.dead_letters import Place, origin, said_of
from undercurrent.protocol.generations import GenerationsReader, RequestState
from undercurrent.protocol.messages import Accepted, GenerationEvent, Message, PromptRequest, Released
from undercurrent.protocol.requeue import (
    Note,
    objection_to_letter,
    objection_to_prompt,
    read_note,
    requeued_headers,
    run_again,
)
from undercurrent.topics import DLQ_EXTRA_BYTES, DLQ_SUFFIX, partition_of

_WRITE_S = 30.0
# Times are of several brokers.
_MARGIN_MS = 10_000


@dataclass(frozen=True, slots=True)
class DeadLetterRecord:
    """A dead letter as it lies in its topic.

    Args:
        record: it.
        place: where it lies.
        said: what its headers say.
        source: the record that it is of; None where its headers do not say so.
        requeued: the last note of its requeue.
        erased: its request is: neither its bytes nor its message are to be shown.
    """

    record: Record
    place: Place
    said: dict[str, str]
    source: Place | None
    requeued: Note | None = None
    erased: bool = False


class Way(NamedTuple):
    """How a letter's record goes back.

    Args:
        where: its topic and partition.
        key: its key.
        value: its bytes.
    """

    where: Partition
    key: bytes | None
    value: bytes | None


class Requeued(NamedTuple):
    """What is noted of a requeue.

    Args:
        where: partition of the letter, and of the note.
        note: it.
    """

    where: Partition
    note: Note


def place_of(text: str) -> Place:
    """Return the place in `TOPIC:PARTITION:OFFSET`, as `dlq list` shows it.

    Raises:
        ConfigError: it is no such text.
    """
    try:
        topic, partition, offset = text.rsplit(":", 2)
        found = Place(topic, int(partition), int(offset))
    except ValueError:
        found = Place("", -1, -1)
    if not found.topic or found.partition < 0 or found.offset < 0:
        raise ConfigError(f"{text!r}: expected TOPIC:PARTITION:OFFSET, as `undercurrent dlq list` shows it")
    return found


class Letters:
    """Reads dead letters.

    Args:
        pipeline: the topics.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def message(self, letter: DeadLetterRecord) -> Message:
        """Return the message that a letter's bytes are after all, as those of a prompt that was refused.

        Raises:
            DecodeError: they are none.
        """
        return self._pipeline.codec.decode(letter.record.value)

    @property
    def topics(self) -> list[str]:
        """The dead-letter topics."""
        return [name for name in self._pipeline.topics if name.endswith(DLQ_SUFFIX)]

    def spans(self, topics: list[str], since_ms: int | None) -> dict[Partition, Span]:
        """Return what of some topics is read."""
        wanted = [where for name in topics for where in self._pipeline.topics[name]]
        return self._pipeline.spans(wanted, since_ms)

    def read(
        self, spans: dict[Partition, Span], progress: Progress | None = None
    ) -> Iterator[DeadLetterRecord | Requeued]:
        """Yield letters and what is noted of their requeues, each partition's in order."""
        for record in self._pipeline.read(spans, progress=progress):
            said = said_of(record.headers)
            note = read_note(said)
            yield _letter(record, said) if note is None else Requeued(record.source, note)

    def one(self, place: Place) -> DeadLetterRecord:
        """Return a letter, with what is known of its requeue.

        Raises:
            TopicError: there is none.
        """
        if place.topic not in self.topics:
            raise TopicError(f"{place.topic} is none of the dead-letter topics {', '.join(self.topics)}")
        where = Partition(place.topic, place.partition)
        if where not in self._pipeline.topics[place.topic]:
            raise TopicError(f"{place.topic} has no partition {place.partition}")
        span = self.spans([place.topic], None)[where]
        if not span.start <= place.offset < span.end:
            raise TopicError(f"{place}: the topic has offsets {span.start} to {span.end - 1}")
        found: DeadLetterRecord | None = None
        for item in self.read({where: Span(place.offset, span.end)}):
            if isinstance(item, Requeued):
                if found is not None and item.note.letter == place.offset:
                    found = replace(found, requeued=item.note)
            elif item.place.offset == place.offset:
                found = item
        if found is None:
            raise TopicError(f"{place}: no letter lies there")
        return replace(found, erased=self._pipeline.erasures().covers(found.record.key))

    def objection(self, letter: DeadLetterRecord) -> str | None:
        """Return why a letter may not be requeued, None where it may."""
        record = letter.record
        if letter.erased:
            return "its request is erased"
        wrong = objection_to_letter(self._pipeline.prefix, letter.place, record.value, record.headers)
        if wrong is not None or letter.source is None:
            return wrong
        request_id = (record.key or b"").decode(errors="replace")
        return objection_to_prompt(request_id, self._state(letter, request_id))

    def caveat(self, letter: DeadLetterRecord) -> str:
        """Return what to know before a letter is requeued, empty where that is nothing."""
        try:
            readable = isinstance(self.message(letter), PromptRequest)
        except DecodeError:
            readable = False
        if readable:
            return ""
        return (
            "its bytes cannot be read and go back as they are, under the same id: workers answer it as a repeat until "
            "topics.dedupe_window_ms (an hour by default) has passed since it came, and dead-letter it again after "
            "that, unless they are of a version that can read it"
        )

    def way(self, letter: DeadLetterRecord) -> Way:
        """Return how a letter's record goes back: a prompt that can be read under its next id, other bytes as they are.

        Raises:
            RequeueError: the next id would be too long.
            TopicError: its headers do not say where it comes from.
        """
        record, source = letter.record, letter.source
        if source is None:
            raise TopicError(f"{letter.place}: its headers do not say where it comes from")
        try:
            prompt = self.message(letter)
        except DecodeError:
            prompt = None
        if not isinstance(prompt, PromptRequest):
            return Way(Partition(source.topic, source.partition), record.key, record.value)
        again = run_again(prompt, time.time_ns() // 1000)
        number = partition_of(again.request_id, len(self._pipeline.topics[source.topic]))
        return Way(Partition(source.topic, number), again.request_id.encode(), self._pipeline.codec.encode(again))

    def requeue(self, letter: DeadLetterRecord, way: Way) -> Note:
        """Write a letter's record back, with a note before and after it.

        Raises:
            UnreachableError: it was not acknowledged; the first note says that it was tried.
        """
        record = letter.record
        settings = self._pipeline.settings.with_room(len(way.value or b"") + DLQ_EXTRA_BYTES)
        publisher = Publisher(settings)
        note = Note(letter.place.offset, time.time_ns() // 1_000_000)
        home = (letter.place.topic, letter.place.partition)
        try:
            _write(publisher, home, record.key, None, note.headers())
            back = requeued_headers(record.headers, letter.place)
            done = replace(note, to=(way.where.number, _write(publisher, way.where, way.key, way.value, back)))
            _write(publisher, home, record.key, None, done.headers())
        finally:
            publisher.close()
        return done

    def _state(self, letter: DeadLetterRecord, request_id: str) -> RequestState | None:
        where = Partition(f"{self._pipeline.prefix}.generations", letter.place.partition)
        lookup, codec, reader = self._pipeline.lookup, self._pipeline.codec, GenerationsReader()
        begin, end = lookup.beginning([where])[where], lookup.end([where])[where]
        written_ms = letter.said.get("timestamp_ms")
        if written_ms is not None:
            begin = max(begin, lookup.at_time([where], int(written_ms) - _MARGIN_MS)[where])
        for record in self._pipeline.read({where: Span(begin, end)}):
            if record.key != letter.record.key:
                continue
            try:
                message = codec.decode(record.value)
            except CodecError:
                continue
            if isinstance(message, Accepted | Released | GenerationEvent):
                reader.apply(message, offset=record.offset)
        return reader.get(request_id)


def _letter(record: Record, said: dict[str, str]) -> DeadLetterRecord:
    place = Place(record.topic, record.partition, record.offset)
    return DeadLetterRecord(record, place, said, origin(record.headers))


def _write(
    publisher: Publisher, where: tuple[str, int], key: bytes | None, value: bytes | None, headers: HeaderList
) -> int:
    """Write a record and return its offset once it is acknowledged."""
    topic, partition = where
    delivered: list[Delivery] = []
    error = publisher.produce(topic, value, key=key, partition=partition, headers=headers, on_delivery=delivered.append)
    if error is None:
        publisher.flush(_WRITE_S)
        error = delivered[0].error if delivered else None
    if error is not None or not delivered:
        reason = f"no answer in {_WRITE_S:g} s" if error is None else error.reason
        raise UnreachableError(f"{topic}[{partition}] took no record: {reason}")
    return delivered[0].offset
