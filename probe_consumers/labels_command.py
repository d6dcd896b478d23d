"""What `undercurrent labels` does: rows to messages on the compacted topic, spans of text mapped to tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from undercurrent.codec import Codec
from undercurrent.counts import counted
from undercurrent.errors import DatasetError, DecodeError, UnreachableError
from undercurrent.evaluation.labels import LabelRow, joined, key_of
from undercurrent.evaluation.spans import Generated, SpanMapper
from undercurrent.kafka.publisher import Delivery, Publisher
from undercurrent.kafka.records import Record
from undercurrent.protocol.generations import GenerationsReader, Ruling
from undercurrent.protocol.messages import Accepted, GenerationEvent, Label, Released
from undercurrent.topics import partition_of

_FLUSH_S = 30.0


@dataclass(slots=True)
class Mapped:
    """Labels, and what became of their spans of text.

    Args:
        labels: ready to be written.
        widened: spans that were widened to whole tokens, in words.
        unaligned: rows that are not among the labels, and why.
    """

    labels: list[Label] = field(default_factory=list)
    widened: list[str] = field(default_factory=list)
    unaligned: list[str] = field(default_factory=list)


def generated_texts(codec: Codec, records: Iterable[Record], wanted: Collection[str]) -> dict[str, Generated]:
    """Return what some requests generated, by request id; of several children the first.

    Args:
        codec: decodes messages.
        records: of the generations topic, each partition's in order.
        wanted: request ids.
    """
    reader = GenerationsReader()
    pieces: defaultdict[str, list[GenerationEvent]] = defaultdict(list)
    found: dict[str, Generated] = {}
    for record in records:
        if record.key is None or record.key.decode(errors="replace") not in wanted:
            continue
        try:
            message = codec.decode(record.value)
        except DecodeError:
            continue
        if not isinstance(message, Accepted | Released | GenerationEvent):
            continue
        ruling = reader.apply(message, offset=record.offset)
        name = message.request_id
        if ruling is Ruling.HOLDS:
            pieces.pop(name, None)
        elif isinstance(message, GenerationEvent) and message.index == 0 and ruling in (Ruling.TOKENS, Ruling.CLOSED):
            pieces[name].append(message)
            if ruling is Ruling.CLOSED:
                events = pieces.pop(name)
                found[name] = Generated(
                    prompt_tokens=message.prompt_tokens,
                    token_ids=tuple(token for event in events for token in event.token_ids),
                    text="".join(event.text for event in events),
                )
    return found


def mapped(
    rows: Sequence[LabelRow],
    texts: Callable[[Collection[str]], dict[str, Generated]],
    tokenizer: Any | None,  # noqa: ANN401 - tokenizers.Tokenizer has no types
    now: datetime | None = None,
) -> Mapped:
    """Return the labels of some rows, their spans of text as spans of tokens.

    Args:
        rows: the labels.
        texts: returns what requests generated; called only when a row has a span of text.
        tokenizer: of the model.
        now: time of rows that have none.

    Raises:
        DatasetError: there is a span of text, and no tokenizer.
    """
    at = now or datetime.now(UTC)
    spanned = {row.request_id for row in rows if row.chars is not None}
    if spanned and tokenizer is None:
        raise DatasetError(
            f"request {min(spanned)!r} has char_start: name the model's tokenizer.json with --tokenizer, or give "
            "token_start and token_end"
        )
    known = texts(spanned) if spanned else {}
    mappers = {name: SpanMapper(tokenizer, generated) for name, generated in known.items()}
    result = Mapped()
    for row in rows:
        if row.chars is None:
            result.labels.append(row.label(at))
            continue
        where = f"{row.request_id} {row.name} [{row.char_start}, {row.char_end})"
        mapper = mappers.get(row.request_id)
        tokens = "its final event is not on the topic" if mapper is None else mapper.tokens(*row.chars)
        if isinstance(tokens, str):
            result.unaligned.append(f"{where}: {tokens}")
            continue
        if not tokens.exact:
            result.widened.append(f"{where}: widened to tokens {tokens.start} to {tokens.end - 1}")
        result.labels.append(row.label(at, (tokens.start, tokens.end)))
    result.labels = joined(result.labels)
    return result


def write_labels(publisher: Publisher, topic: str, partitions: int, labels: Iterable[Label], codec: Codec) -> int:
    """Write labels and wait until each is acknowledged; return how many.

    Raises:
        UnreachableError: one was not acknowledged.
    """
    failed: list[str] = []

    def delivered(delivery: Delivery) -> None:
        if delivery.error is not None:
            failed.append(delivery.error.reason)

    count = 0
    for label in labels:
        key = key_of(label)
        value = codec.encode(label)
        number = partition_of(key.decode(), partitions)
        while (error := publisher.produce(topic, value, key=key, partition=number, on_delivery=delivered)) is not None:
            if not error.queue_full:
                raise UnreachableError(f"{topic}: {error.reason}")
            publisher.poll(0.1)
        publisher.poll(0.0)
        count += 1
    left = publisher.flush(_FLUSH_S)
    if left or failed:
        why = failed[0] if failed else f"no answer in {_FLUSH_S:g} s"
        raise UnreachableError(f"{topic}: {left + len(failed):,} of {counted(count, 'label')} not acknowledged: {why}")
    return count
