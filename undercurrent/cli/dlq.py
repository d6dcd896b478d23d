"""`undercurrent dlq`: records that nobody could work on: listed, shown, and written back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile, Prefix
from undercurrent.cli.tables import moment
from undercurrent.cli.times import parse_time
from undercurrent.counts import counted
from undercurrent.files import write_bytes

if TYPE_CHECKING:
    from undercurrent.insight.letter_list import LetterList
    from undercurrent.insight.letters import DeadLetterRecord, Letters

app = typer.Typer(
    help="Look at records that nobody could work on, and write them back.", no_args_is_help=True, add_completion=False
)

Where = Annotated[str, typer.Argument(metavar="TOPIC:PARTITION:OFFSET", help="The letter, as `dlq list` shows it.")]
Json = Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")]

_BYTES_SHOWN = 256


@app.command("list")
def list_letters(
    topic: Annotated[
        str | None, typer.Option("--topic", help="Only letters of this topic, as undercurrent.prompts; all without it.")
    ] = None,
    cause: Annotated[str | None, typer.Option("--cause", help="Only letters with this cause.")] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="Letters from this time on: ISO 8601, Unix seconds, or 30m, 6h, 2d ago."),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="The last so many of each topic.")] = 50,
    config: ConfigFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
    json_lines: Json = False,
) -> None:
    """List dead letters, oldest first, with why and by whom; requeued ones say so.

    A record that has several letters is listed once, by the first.
    """
    from undercurrent.cli.progress import progress
    from undercurrent.insight.letter_list import LetterList

    since_ms = None if since is None else parse_time(since, "--since")
    letters = _letters(config, prefix, bootstrap_servers)
    spans = letters.spans(_topics(letters, topic), since_ms)
    found = LetterList(count, cause)
    with progress("reading letters", sum(map(len, spans.values()))) as advance:
        for item in letters.read(spans, advance):
            found.take(item)
    if json_lines:
        from undercurrent.cli.jsonl import dumps

        sys.stdout.writelines(dumps(_row(letter, found.repeats[letter.place])) + "\n" for letter in found)
    else:
        _write_list(found)


@app.command()
def show(
    where: Where,
    save: Annotated[
        Path | None, typer.Option("--save", dir_okay=False, help="Write the record's bytes to this file.")
    ] = None,
    config: ConfigFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Show one dead letter: what its headers say, the message where it is one, and its bytes."""
    from undercurrent.errors import ConfigError, TopicError
    from undercurrent.insight.letters import place_of

    place = place_of(where)
    letters = _letters(config, prefix, bootstrap_servers)
    letter = letters.one(place)
    if save is not None:
        if letter.erased:
            raise TopicError(f"{letter.place}: its request is erased, and nothing of it is saved")
        try:
            write_bytes(save, letter.record.value or b"")
        except OSError as exc:
            raise ConfigError(f"--save {save}: {exc.strerror or exc}") from exc
    _write_letter(letters, letter, letters.objection(letter))


@app.command()
def requeue(
    where: Where,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also a letter that was requeued before.")] = False,
    config: ConfigFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Write a dead letter's record back to its topic, at the end of the log.

    Prompts alone can go back, and only where their request ended as failed: under a new id where the prompt can be read
    (`r~2` for `r`), else with the same bytes, key and partition. Exit 1 when it may not, with the reason.
    """
    from undercurrent.insight.letters import place_of

    letters = _letters(config, prefix, bootstrap_servers)
    letter = letters.one(place_of(where))
    wrong = letters.objection(letter)
    if wrong is None and letter.requeued is not None and not again:
        wrong = f"{letter.requeued} ({moment(letter.requeued.at_ms * 1000)}); --again writes it once more"
    if wrong is not None:
        sys.stderr.write(f"undercurrent dlq requeue: {letter.place}: not requeued: {wrong}\n")
        return 1
    if caveat := letters.caveat(letter):
        sys.stderr.write(f"undercurrent dlq requeue: {letter.place}: {caveat}\n")
    way = letters.way(letter)
    said = (
        f"{counted(len(way.value or b''), 'byte')} under key {_text(way.key)} to {way.where.topic}[{way.where.number}]"
    )
    if dry_run:
        sys.stdout.write(f"would write {said}\n")
        return 0
    note = letters.requeue(letter, way)
    sys.stdout.write(f"wrote {said}" + ("\n" if note.to is None else f" offset {note.to[1]}\n"))
    return 0


def _letters(config: Path | None, prefix: str | None, bootstrap_servers: str | None) -> Letters:
    from undercurrent.cli.pipelines import pipeline_of
    from undercurrent.insight.letters import Letters

    return Letters(pipeline_of(config, prefix, bootstrap_servers))


def _topics(letters: Letters, topic: str | None) -> list[str]:
    from undercurrent.errors import TopicError
    from undercurrent.topics import DLQ_SUFFIX

    if topic is None:
        return letters.topics
    name = topic if topic.endswith(DLQ_SUFFIX) else topic + DLQ_SUFFIX
    if name not in letters.topics:
        raise TopicError(f"{name} is none of the dead-letter topics {', '.join(letters.topics)}")
    return [name]


def _row(letter: DeadLetterRecord, repeats: int) -> dict[str, Any]:
    said, note = letter.said, letter.requeued
    return {
        "letter": _name(letter),
        "cause": said.get("cause", "unknown"),
        "at_ms": letter.record.timestamp_ms,
        "service": said.get("service", ""),
        "key": _key(letter),
        "bytes": len(letter.record.value or b""),
        "detail": said.get("detail", ""),
        "topic": said.get("topic"),
        "partition": letter.place.partition,
        "offset": None if letter.source is None else letter.source.offset,
        "repeats": repeats,
        "requeued": note is not None,
        "requeued_to": None
        if note is None or note.to is None
        else dict(zip(("partition", "offset"), note.to, strict=True)),
    }


def _write_list(found: LetterList) -> None:
    from rich.padding import Padding

    from undercurrent.cli.rendering import console, text
    from undercurrent.topics import DLQ_SUFFIX

    out = console()
    if not found.sums:
        out.print("no dead letters")
        return
    shown = list(found)
    for letter in shown:
        note = letter.requeued
        back = "" if note is None else "requeued; " if note.to is not None else "requeue begun; "
        head = text(_name(letter), "bold")
        head.append(f"  {letter.said.get('cause', 'unknown')}", "red")
        head.append(f"  {moment(letter.record.timestamp_ms * 1000).removesuffix('+00:00')}")
        if found.repeats[letter.place]:
            head.append(f"  written {found.repeats[letter.place] + 1} times")
        out.print(head)
        key = "no key" if letter.record.key is None else f"key {_key(letter)}"
        out.print(Padding(text(f"{back}{key}: {letter.said.get('detail', '')}"), (0, 0, 0, 4), expand=False))
    listed = ", ".join(
        f"{count:,} {why} of {topic.removesuffix(DLQ_SUFFIX)}" for (topic, why), count in sorted(found.sums.items())
    )
    total = sum(found.sums.values())
    told = f"{counted(total, 'letter')}: {listed}"
    out.print(text(told + (f"; the last {len(shown):,} are shown" if len(shown) < total else "")))


def _write_letter(letters: Letters, letter: DeadLetterRecord, wrong: str | None) -> None:
    from rich.table import Table

    from undercurrent.cli.rendering import console, text

    out, record, value = console(), letter.record, b"" if letter.erased else letter.record.value or b""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    facts = {
        "letter": _name(letter),
        "of": "not said" if letter.source is None else str(letter.source),
        "key": _key(letter),
    }
    facts |= {name: said for name, said in letter.said.items() if name not in ("topic", "partition", "offset")}
    own = {
        name: (said or b"").decode(errors="replace")
        for name, said in record.headers
        if not name.startswith("undercurrent.")
    }
    facts |= {f"header {name}": said for name, said in own.items()}
    facts["requeue"] = (
        str(letter.requeued)
        if letter.requeued is not None
        else f"refused: {wrong}"
        if wrong
        else f"possible; {caveat}"
        if (caveat := letters.caveat(letter))
        else "possible"
    )
    for name, said in facts.items():
        told = f"{said} ({moment(int(said) * 1000)})" if name.endswith("_ms") and said.isdigit() else said
        table.add_row(text(name), text(told))
    table.add_row(text("message"), text("erased" if letter.erased else _message(letters, letter)))
    out.print(table)
    if letter.erased:
        return
    more = f", the first {_BYTES_SHOWN} of {len(value)}" if len(value) > _BYTES_SHOWN else ""
    out.print(text(f"{counted(len(value), 'byte')}{more}:", "bold"))
    for at in range(0, min(len(value), _BYTES_SHOWN), 16):
        row = value[at : at + 16]
        readable = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        out.print(text(f"{at:6d}  {row.hex(' '):47s}  {readable}"))


def _message(letters: Letters, letter: DeadLetterRecord) -> str:
    from undercurrent.cli.jsonl import dumps, message_dict
    from undercurrent.errors import DecodeError

    try:
        return dumps(message_dict(letters.message(letter)))
    except DecodeError as exc:
        return f"none: {exc.reason}"


def _name(letter: DeadLetterRecord) -> str:
    return f"{letter.place.topic}:{letter.place.partition}:{letter.place.offset}"


def _key(letter: DeadLetterRecord) -> str:
    return _text(letter.record.key)


def _text(key: bytes | None) -> str:
    return "none" if key is None else key.decode(errors="backslashreplace")
