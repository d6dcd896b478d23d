"""`undercurrent tail TOPIC`: a topic's messages as JSON lines."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile
from undercurrent.errors import ConfigError, DecodeError, TopicError, UnreachableError

if TYPE_CHECKING:
    from undercurrent.codec.avro import Codec
    from undercurrent.kafka.reader import AssignedReader
    from undercurrent.kafka.records import Partition, Record

app = typer.Typer(add_completion=False)

FETCH_RECORDS = 500
POLL_S = 0.25
STALL_S = 30.0


class Start(StrEnum):
    """Where to begin."""

    EARLIEST = "earliest"
    LATEST = "latest"


@app.command()
def tail(
    topic: Annotated[str, typer.Argument(help="Name of the topic, for example undercurrent.generations.")],
    start: Annotated[Start, typer.Option("--from", help="Where to begin.")] = Start.EARLIEST,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Stop after this many messages.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more instead of ending at the end.")] = False,
    partition: Annotated[
        list[int] | None, typer.Option("--partition", min=0, help="Only this partition; may be repeated.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Only messages with this key, as a request id.")] = None,
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Also what transactions wrote that are open or were given up.")
    ] = False,
    config: ConfigFile = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Print a topic's messages as JSON lines: decoded, tensors as shape and norm.

    Every line has the record's place (`partition`, `offset`, `timestamp_ms`, `key`) and the message. Bytes that are no
    message become a line with `undecodable`: what is wrong with them. A probe host writes verdicts in transactions: one
    that is not committed was never said, so it is only shown with `--uncommitted`.
    """
    if start is Start.LATEST and not follow:
        raise ConfigError("--from latest shows nothing unless --follow waits for more")
    # Imported here: `--help` needs no Kafka client.
    from undercurrent.kafka.client import Isolation
    from undercurrent.kafka.offsets import OffsetLookup
    from undercurrent.kafka.reader import AssignedReader
    from undercurrent.pipeline import connection, interactive, read_sections
    from undercurrent.subjects import codec_of

    isolation = Isolation.READ_UNCOMMITTED if uncommitted else Isolation.READ_COMMITTED
    settings = interactive(connection(read_sections(config), bootstrap_servers))
    lookup = OffsetLookup(settings)
    wanted = choose(lookup.partitions(topic), partition)
    ends = lookup.end(wanted, isolation=isolation)
    first = ends if start is Start.LATEST else lookup.beginning(wanted)
    starts = {(place.topic, place.number): offset for place, offset in first.items()}
    codec = codec_of(settings)
    with AssignedReader(settings, starts, isolation=isolation, lookup=lookup) as reader:
        records = read(reader, None if follow else ends)
        matching = (record for record in records if key is None or record.key == key.encode())
        for record in itertools.islice(matching, count):
            sys.stdout.write(line(record, codec) + "\n")
            if follow:
                sys.stdout.flush()


def choose(found: list[Partition], numbers: list[int] | None) -> list[Partition]:
    """Return the partitions asked for, or all.

    Raises:
        TopicError: one does not exist.
    """
    if not numbers:
        return found
    known = {partition.number: partition for partition in found}
    for number in numbers:
        if number not in known:
            raise TopicError(f"{found[0].topic} has partitions 0 to {len(found) - 1}, not {number}")
    return [known[number] for number in sorted(set(numbers))]


def read(reader: AssignedReader, ends: Mapping[Partition, int] | None) -> Iterator[Record]:
    """Yield records as they come, up to some ends or for ever.

    Raises:
        TopicError: a partition cannot be read.
        UnreachableError: up to some ends, and nothing arrives any more.
    """
    moved_s, before = time.monotonic(), reader.positions
    while ends is None or any(reader.positions[partition] < end for partition, end in ends.items()):
        for record in reader.poll_batch(FETCH_RECORDS, POLL_S):
            if ends is None or record.offset < ends[record.source]:
                yield record
        for event in reader.take_events():
            raise TopicError(f"{event.partition} at offset {event.position}: {event.reason}")
        if reader.positions != before:
            moved_s, before = time.monotonic(), reader.positions
        elif ends is not None and time.monotonic() - moved_s > STALL_S:
            behind = next(partition for partition, end in ends.items() if reader.positions[partition] < end)
            raise UnreachableError(f"{reader.waiting or behind}: nothing arrived for {STALL_S:g} s")


def line(record: Record, codec: Codec) -> str:
    """Return a record as one line of JSON."""
    from undercurrent.cli.jsonl import dumps, message_dict

    key = None if record.key is None else record.key.decode(errors="backslashreplace")
    place: dict[str, Any] = {
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": key,
    }
    if record.headers:
        place["headers"] = {name: (value or b"").decode(errors="backslashreplace") for name, value in record.headers}
    try:
        return dumps({**place, **message_dict(codec.decode(record.value))})
    except DecodeError as exc:
        return dumps({**place, "undecodable": exc.reason, "bytes": len(record.value or b"")})
