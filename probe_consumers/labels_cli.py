"""`undercurrent labels`: what somebody says requests are, written onto the compacted topic of labels."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile, Prefix
from undercurrent.counts import counted

if TYPE_CHECKING:
    from undercurrent.evaluation.labels import LabelRow

app = typer.Typer(help="Label requests, at once or days later.", no_args_is_help=True, add_completion=False)

Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", exists=True, help="The model's tokenizer.json, or its folder, for spans of text."),
]


@app.command()
def add(
    request_id: Annotated[str, typer.Argument(help="The request.")],
    name: Annotated[str, typer.Argument(help="What is judged, for example jailbreak.")],
    value: Annotated[str, typer.Argument(help="positive, negative or unknown.")],
    source: Annotated[str, typer.Option("--source", help="Who says so.")] = "operator",
    version: Annotated[str, typer.Option("--version", help="Of the source or its guideline.")] = "",
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="START:END, absolute positions, the second one not included.")
    ] = None,
    chars: Annotated[
        str | None, typer.Option("--chars", help="START:END, characters of the generated text; needs --tokenizer.")
    ] = None,
    sampling_probability: Annotated[
        float | None, typer.Option("--sampling-probability", help="Chance that the request was drawn to be labelled.")
    ] = None,
    tokenizer: Tokenizer = None,
    config: ConfigFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Label one request. A label of the same request, name and source is replaced."""
    from undercurrent.errors import ConfigError, DatasetError
    from undercurrent.evaluation.labels import parse_row, parse_span

    fields = {
        "request_id": request_id,
        "name": name,
        "value": value,
        "source": source,
        "version": version,
        "sampling_probability": sampling_probability,
        **parse_span(tokens, "token"),
        **parse_span(chars, "char"),
    }
    try:
        row = parse_row(fields, "label")
    except DatasetError as exc:
        # These words come from the command line, where a wrong one is a wrong option.
        raise ConfigError(str(exc)) from exc
    return _write([row], tokenizer, config, prefix, bootstrap_servers)


@app.command("import")
def import_labels(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Rows as .jsonl, .csv with a header, or .parquet.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="Of rows that have none.")] = None,
    source: Annotated[str | None, typer.Option("--source", help="Of rows that have none.")] = None,
    version: Annotated[str | None, typer.Option("--version", help="Of rows that have none.")] = None,
    tokenizer: Tokenizer = None,
    config: ConfigFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Label the requests of a file; nothing is written when one of its rows is wrong.

    Fields: request_id, name, value, source; and, where they are known, token_start and token_end (absolute positions)
    or char_start and char_end (of the generated text), version, sampling_probability, created_at. Spans of text are
    mapped to tokens; those that do not align are printed and left out, and the exit code is 1. Rows that differ in
    nothing but their span are one label.
    """
    from undercurrent.evaluation.labels import read_labels

    rows = list(read_labels(file, {"name": name, "source": source, "version": version}))
    return _write(rows, tokenizer, config, prefix, bootstrap_servers)


def _write(
    rows: Sequence[LabelRow],
    tokenizer: Path | None,
    config: Path | None,
    prefix: str | None,
    bootstrap_servers: str | None,
) -> int:
    from probe_consumers.dataset_source import KafkaSource
    from probe_consumers.labels_command import generated_texts, mapped, write_labels
    from probe_consumers.replay_range import RangeRequest
    from undercurrent.acls import Service
    from undercurrent.cli.planning import plan_of
    from undercurrent.evaluation.spans import Generated, load_tokenizer
    from undercurrent.kafka.admin import TopicAdmin
    from undercurrent.kafka.publisher import Publisher
    from undercurrent.pipeline import connection, interactive, permitted, read_sections
    from undercurrent.subjects import codec_of

    sections = read_sections(config)
    plan = plan_of(sections, config, None, prefix)
    settings = interactive(connection(sections, bootstrap_servers))
    permitted(settings, Service.OPERATOR, plan, only={plan.labels})

    def texts(wanted: Collection[str]) -> dict[str, Generated]:
        part = KafkaSource(settings).part(plan.generations, RangeRequest())
        return {} if part is None else generated_texts(codec_of(settings), part.records, wanted)

    result = mapped(rows, texts, None if tokenizer is None else load_tokenizer(tokenizer))
    topic = next(topic for topic in plan.topics() if topic.name == plan.labels)
    admin = TopicAdmin(settings)
    # A pipeline that was set up before there were labels has no topic of them.
    if not admin.describe([topic.name], with_config=False):
        admin.create([topic], replication_factor=plan.replication_factor)
    admin.check_partitions([topic])
    publisher = Publisher(settings)
    try:
        count = write_labels(publisher, topic.name, topic.partitions, result.labels, codec_of(settings, plan))
    finally:
        publisher.close()
    for line in result.widened:
        sys.stdout.write(line + "\n")
    for line in result.unaligned:
        sys.stderr.write(f"not aligned, left out: {line}\n")
    sys.stdout.write(f"{counted(count, 'label')} written to {topic.name}\n")
    return 1 if result.unaligned else 0
