"""Which requests a replay is of, where not all are wanted: by name, by label, or the latest ones."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from undercurrent.codec import Codec
from undercurrent.errors import ConfigError, DecodeError, ProtocolError
from undercurrent.evaluation.dataset_format import LABELS, REQUESTS, read_table
from undercurrent.evaluation.dataset_tables import resolved
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.ranges import Piece, TopicRange
from undercurrent.protocol.labels import label_key_parts
from undercurrent.protocol.messages import Label, LabelValue, StreamStarted
from undercurrent.subjects import codec_of

logger = logging.getLogger(__name__)

_FIRST_WINDOW = 4096
Told = Mapping[tuple[str, str], Mapping[str, str]]
"""Values by source, by request and name of the label."""


def parse_labels(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return names and values of labels.

    Args:
        texts: each `NAME=VALUE`.

    Raises:
        ConfigError: one is not, or the value is none of a label's.
    """
    found = []
    for text in texts:
        name, _, value = text.rpartition("=")
        if not name or value not in set(LabelValue):
            raise ConfigError(f"--label {text!r}: expected NAME=VALUE with one of {', '.join(LabelValue)}")
        found.append((name, value))
    return tuple(found)


def read_requests(path: Path) -> frozenset[str]:
    """Return the request ids in a file, one a line.

    Raises:
        ConfigError: it cannot be read, or names none.
    """
    try:
        found = frozenset(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    if not found:
        raise ConfigError(f"{path}: no request id in it; expected one a line")
    return found


def labels_on_topic(settings: KafkaSettings, topic: str) -> Told:
    """Return what the labels of a topic say; the last one of each key counts.

    A record that cannot be read is passed over with a warning: on a compacted topic it stays for ever.

    Raises:
        TopicError: there is no such topic.
    """
    codec = codec_of(settings)
    told: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for record in TopicRange.by_time(settings, topic).read():
        try:
            if record.value is None:
                request_id, name, source = label_key_parts(record.key or b"")
                told[request_id, name].pop(source, None)
                continue
            message = codec.decode(record.value)
        except (DecodeError, ProtocolError) as exc:
            logger.warning("%s at offset %d: no label can be read: %s", record.source, record.offset, exc)
            continue
        if isinstance(message, Label):
            told[message.request_id, message.name][message.source] = message.value.value
    return told


def labels_of_dataset(folder: Path) -> Told:
    """Return what the labels of a dataset say."""
    told: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    columns = read_table(folder / LABELS, ["request_id", "name", "source", "value"]).to_pydict()
    for request_id, name, source, value in zip(*columns.values(), strict=True):
        told[request_id, name][source] = value
    return told


def labelled(told: Told, labels: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the requests that have all of some labels; where sources disagree a label is unknown.

    Raises:
        ConfigError: no request has them.
    """
    wanted = list(labels)
    for name, _ in wanted:
        if not any(known == name for _, known in told):
            names = ", ".join(sorted({known for _, known in told})) or "none"
            raise ConfigError(f"--label: there is no label {name!r}; there is {names}")
    sets = [
        {request for (request, known), values in told.items() if known == name and resolved(values.values()) == value}
        for name, value in wanted
    ]
    return frozenset(set.intersection(*sets))


def last_of_dataset(folder: Path, count: int) -> frozenset[str]:
    """Return the requests of a dataset that started last."""
    columns = read_table(folder / REQUESTS, ["request_id", "started_at_us"]).to_pydict()
    latest: dict[str, int] = {}
    for request_id, at_us in zip(*columns.values(), strict=True):
        latest[request_id] = max(at_us, latest.get(request_id, at_us))
    return frozenset(sorted(latest, key=lambda name: (latest[name], name))[-count:])


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a request's latest attempt starts: sorts by time."""

    timestamp_ms: int
    partition: int
    offset: int


def last_of_topic(
    part: TopicRange, count: int, codec: Codec, *, window: int = _FIRST_WINDOW
) -> tuple[TopicRange, frozenset[str]]:
    """Return the requests of a range whose latest attempt started last, and the part of the range from there on.

    The range is read backwards, in windows that grow, until no earlier record can be of one of them.

    Args:
        part: the range.
        count: how many requests.
        codec: decodes.
        window: records of each partition that are read at first.
    """
    while True:
        pieces = tuple(replace(piece, start=max(piece.start, piece.end - window)) for piece in part.pieces)
        starts, oldest_ms = _starts(part.narrowed(pieces), codec)
        chosen = sorted(starts, key=lambda name: (starts[name].timestamp_ms, name))[-count:]
        whole = [piece.start == asked.start for piece, asked in zip(pieces, part.pieces, strict=True)]
        since_ms = starts[chosen[0]].timestamp_ms if len(chosen) == count else -1
        # A window that begins after the first of the chosen ones may hide a later one of its partition.
        if all(
            is_whole or oldest_ms.get(piece.partition.number, since_ms + 1) < since_ms
            for is_whole, piece in zip(whole, pieces, strict=True)
        ):
            found = part if len(chosen) < count else _from(part, pieces, [starts[name] for name in chosen])
            return found, frozenset(chosen)
        window *= 4


def _starts(part: TopicRange, codec: Codec) -> tuple[dict[str, _Start], dict[int, int]]:
    """Return where each request's latest attempt starts, and when the first record of each partition was appended."""
    found: dict[str, tuple[int, _Start]] = {}
    oldest: dict[int, int] = {}
    for record in part.read():
        oldest.setdefault(record.partition, record.timestamp_ms)
        try:
            # Most records are blocks, which cost far more to decode.
            name = codec.schema_of(record.value or b"")[0].partition(".")[0]
            message = codec.decode(record.value) if name == StreamStarted.__name__ else None
        except DecodeError:  # the replay says so itself
            continue
        if isinstance(message, StreamStarted) and message.attempt > found.get(message.request_id, (-1,))[0]:
            start = _Start(record.timestamp_ms, record.partition, record.offset)
            found[message.request_id] = message.attempt, start
    return {name: start for name, (_, start) in found.items()}, oldest


def _from(part: TopicRange, read: tuple[Piece, ...], starts: list[_Start]) -> TopicRange:
    """Return a range from the first of some starts on; nothing of it is deleted, since all of them are there."""
    firsts: dict[int, int] = {}
    for start in starts:
        firsts[start.partition] = min(start.offset, firsts.get(start.partition, start.offset))
    pieces = tuple(replace(piece, start=firsts.get(piece.partition.number, piece.end), deleted=0) for piece in read)
    return part.narrowed(pieces)
