"""`undercurrent prompts`: send prompts, follow what is generated."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile
from undercurrent.counts import counted
from undercurrent.errors import ConfigError

if TYPE_CHECKING:
    from producer.client import PromptProducer
    from producer.prompts import LineError, Prompt
    from producer.settings import ProducerSettings
    from producer.show import View

app = typer.Typer(help="Send prompts and follow what is generated.", no_args_is_help=True, add_completion=False)

# After this long without an engine worker's answer a person wants to know that nobody answers.
HINT_AFTER_S = 10.0

Json = Annotated[bool, typer.Option("--json", help="Every event as a JSON line.")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", min=0.0, help="Give up after this many seconds without any event.")
]


@app.command()
def send(
    text: Annotated[str | None, typer.Argument(help="The prompt. Without it --file or standard input is read.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="<file>", help="Prompts as JSON lines; - is standard input."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show what is generated until every request has ended.")
    ] = False,
    points: Annotated[
        list[str] | None, typer.Option("--points", help="Extraction point wanted; may be repeated. Default: all.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the sampler.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Continuations of each prompt.")] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", help="Not started later than this many seconds from now.")
    ] = None,
    request_id: Annotated[str | None, typer.Option("--request-id", help="Id; a UUIDv7 without it.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option("--metadata", help="KEY=VALUE, your own words; may be repeated.")
    ] = None,
    json_lines: Json = False,
    timeout: Timeout = None,
    config: ConfigFile = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Send one prompt, or a file of them; options are defaults for lines that do not name the field themselves.

    A line that makes no prompt is reported with file, line and field, the others are sent, and the exit code is 2.
    Without --follow the ids are printed, one a line, once the broker has them.
    """
    given = {
        "points": points or None,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "n": n,
        "deadline_s": deadline,
        "request_id": request_id,
        "metadata": _pairs(metadata) or None,
    }
    fields = {name: value for name, value in given.items() if value is not None}
    prompts, total_bytes = _prompts(text, file, fields)
    with _producer(config, bootstrap_servers) as producer:
        ids, refused = _submit(producer, prompts, total_bytes)
        for lost, reason in producer.failed.items():
            sys.stderr.write(f"prompt {lost}: {reason}\n")
        sent = [sent_id for sent_id in ids if sent_id not in producer.failed]
        code = 2 if refused else 1 if producer.failed else 0
        if not follow:
            sys.stdout.writelines(f"{sent_id}\n" for sent_id in sent)
            return code
        single = len(sent) == 1 and n in (None, 1)
        followed = _follow(producer, sent, _view(json_lines, single=single), timeout)
        return code or followed


@app.command("follow")
def follow_requests(
    request_ids: Annotated[list[str], typer.Argument(help="Ids of requests, sent by anyone.", metavar="REQUEST_ID...")],
    json_lines: Json = False,
    timeout: Timeout = None,
    config: ConfigFile = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Show what was and is generated for some requests until every one has ended; the log is read from its start."""
    wanted = list(dict.fromkeys(request_ids))
    with _producer(config, bootstrap_servers, follows=wanted) as producer:
        return _follow(producer, wanted, _view(json_lines, single=len(wanted) == 1), timeout)


@app.command()
def requeue(
    request_ids: Annotated[
        list[str], typer.Argument(help="Ids of requests that have failed.", metavar="REQUEST_ID...")
    ],
    config: ConfigFile = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Run failed requests again, each under a new id, which is printed: `r` as `r~2`.

    What a request has ended as stands for ever, so that it cannot run under its own id again. One that has completed
    or was aborted is refused, and one that has not ended yet; the others are requeued all the same, and the exit code
    is 1. Requeued twice, a request runs once. A deadline is left out.
    """
    from undercurrent.protocol.requeue import RequeueError

    code = 0
    with _producer(config, bootstrap_servers, requeues=True) as producer:
        for request_id in dict.fromkeys(request_ids):
            try:
                sys.stdout.write(f"{producer.requeue(request_id)}\n")
            except RequeueError as exc:
                sys.stderr.write(f"{exc}\n")
                code = 1
        producer.flush()
    return code


def _producer(
    config: Path | None, bootstrap_servers: str | None, *, follows: Collection[str] = (), requeues: bool = False
) -> PromptProducer:
    """Return a producer that sends, or one that only follows requests: those may not be erased."""
    # Imported here: `--help` needs no Kafka client. The clients are built here, for the command that runs.
    from producer.client import PromptProducer
    from undercurrent.acls import Service
    from undercurrent.kafka.erasures import read_erasures
    from undercurrent.pipeline import permitted
    from undercurrent.topics import TopicPlan

    settings = producer_settings(config, bootstrap_servers)
    plan = TopicPlan(prefix=settings.prefix)
    # Whoever requeues reads prompts, which a producer may not.
    service = Service.OPERATOR if requeues else Service.PRODUCER
    permitted(settings.kafka, service, plan, only={plan.generations, plan.erasures if follows else plan.prompts})
    if follows:
        read_erasures(settings.kafka, plan.erasures).refuse(follows)
    return PromptProducer(settings)


def producer_settings(config: Path | None, bootstrap_servers: str | None) -> ProducerSettings:
    """Return what a configuration file and the options say, when a broker answers.

    Raises:
        ConfigError: naming the key and what is wrong with it.
        UnreachableError: no broker answers.
    """
    from producer.settings import ProducerSettings
    from undercurrent.pipeline import connection, interactive, read_sections, topic_plan

    sections = read_sections(config)
    kafka = interactive(connection(sections, bootstrap_servers))
    plan = topic_plan({**sections, "points": None}, Path())
    # Without a word about it in the configuration, the topic's own number is taken.
    stated = "prompt_partitions" in (sections.get("topics") or {})
    partitions = plan.prompt_partitions if stated else None
    return ProducerSettings(kafka=kafka, prefix=plan.prefix, prompt_partitions=partitions)


def _prompts(
    text: str | None, file: Path | None, fields: dict[str, Any]
) -> tuple[Iterator[tuple[Prompt | LineError, int]], int | None]:
    """Return what the input makes, each with the bytes that were read for it, and the input's size if it is known."""
    from producer.prompts import check

    if text is not None:
        if file is not None:
            raise ConfigError("give a prompt or --file, not both")
        made = check({**fields, "prompt": text})
        if isinstance(made, str):
            raise ConfigError(made)
        return iter([(made, 0)]), None
    if "request_id" in fields:
        raise ConfigError("--request-id names one prompt; in a file each line has its own request_id")
    if file is not None and str(file) != "-":
        try:
            # One line that is no UTF-8 must not hold up the others; what makes a prompt of it says which line it is.
            lines = file.open(encoding="utf-8", errors="surrogateescape")
        except OSError as exc:
            raise ConfigError(f"--file {file}: {exc.strerror}") from exc
        return _lines(lines, str(file), fields), file.stat().st_size
    if file is None and sys.stdin.isatty():
        raise ConfigError(
            'nothing to send: give a prompt, --file FILE.jsonl, or lines of {"prompt": "..."} on standard input'
        )
    return _lines(sys.stdin, "<stdin>", fields), None


def _lines(source: TextIO, name: str, fields: dict[str, Any]) -> Iterator[tuple[Prompt | LineError, int]]:
    from producer.prompts import read_lines

    read = 0

    def counted() -> Iterator[str]:
        nonlocal read
        for line in source:
            read += len(line.encode(errors="surrogateescape"))
            yield line

    with source:
        try:
            for made in read_lines(counted(), name, fields):
                done, read = read, 0
                yield made, done
        except UnicodeDecodeError as exc:
            raise ConfigError(f"{name}: not UTF-8 text: {exc.reason} at byte {exc.start}") from exc


def _submit(
    producer: PromptProducer, prompts: Iterable[tuple[Prompt | LineError, int]], total_bytes: int | None
) -> tuple[list[str], int]:
    """Send what can be sent; return the ids and how many lines could not."""
    from producer.client import SubmitError
    from producer.prompts import LineError

    ids, refused = [], 0
    with _progress(total_bytes) as advance:
        for made, read in prompts:
            if isinstance(made, LineError):
                refused += 1
                sys.stderr.write(f"{made}\n")
            else:
                # What failed stands in `producer.failed`, all of it, and the others are sent all the same.
                with contextlib.suppress(SubmitError):
                    ids.append(producer.submit(made))
            advance(read)
        with contextlib.suppress(SubmitError):
            producer.flush()
    return ids, refused


@contextlib.contextmanager
def _progress(total_bytes: int | None) -> Iterator[Any]:
    """Show a bar for a file, on a terminal; give a function that moves it on by some bytes."""
    if total_bytes is None or not sys.stderr.isatty():
        yield lambda read: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("sending"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sending", total=max(1, total_bytes))
        yield lambda read: bar.advance(task, read)


def _view(json_lines: bool, *, single: bool) -> View:
    from producer.show import BlockView, JsonView, StreamView

    if json_lines:
        return JsonView(sys.stdout)
    return StreamView(sys.stdout, sys.stderr) if single else BlockView(sys.stdout)


def _follow(producer: PromptProducer, request_ids: Collection[str], view: View, timeout_s: float | None) -> int:
    """Show the requests to their end; return 1 if one of them gave no result."""
    from producer.show import failed
    from undercurrent.errors import UnreachableError

    follower = producer.follower(request_ids)
    began = heard = time.monotonic()
    hinted, code = False, 0
    for events in producer.batches(follower):
        for event in events:
            view.show(event)
            code = 1 if failed(event) else code
        now = time.monotonic()
        heard = now if events else heard
        if not hinted and follower.waiting and now - began > HINT_AFTER_S:
            hinted = True
            waiting = f"{len(follower.waiting):,} of {counted(len(request_ids), 'request')}"
            sys.stderr.write(f"[no engine worker has accepted {waiting} yet]\n")
        if timeout_s is not None and now - heard > timeout_s:
            raise UnreachableError(f"nothing heard of {counted(len(follower.open), 'request')} for {timeout_s:g} s")
    return code


def _pairs(texts: list[str] | None) -> dict[str, str]:
    pairs = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--metadata {text!r}: expected KEY=VALUE")
        pairs[key] = value
    return pairs
