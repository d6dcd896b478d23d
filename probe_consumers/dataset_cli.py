"""`undercurrent dataset`: recorded activations as a folder of tables and tensors, and back onto topics."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from probe_consumers.recording_options import RecordingOptions
from undercurrent.cli.grouping import with_options
from undercurrent.cli.options import Bootstrap, ConfigFile, PointsFile, Prefix, check_writable
from undercurrent.cli.progress import progress
from undercurrent.counts import counted
from undercurrent.errors import ConfigError

app = typer.Typer(
    help="Recorded activations as a folder of tables and tensors, and back.", no_args_is_help=True, add_completion=False
)

Folder = Annotated[Path, typer.Argument(file_okay=False, help="Folder of the dataset.")]
Json = Annotated[bool, typer.Option("--json", help="The manifest, or the result, as JSON.")]


@app.command("export")
@with_options("read", RecordingOptions)
def export_dataset(
    out: Folder,
    read: RecordingOptions,
    point: Annotated[
        list[str] | None, typer.Option("--point", help="Extraction point; may be repeated; all by default.")
    ] = None,
    text: Annotated[bool, typer.Option("--text/--no-text", help="Prompts, metadata and what was generated.")] = True,
    tensors_in_parquet: Annotated[
        bool, typer.Option("--tensors-in-parquet", help="Values beside each token too, as lists of float32.")
    ] = False,
    shard_mib: Annotated[int, typer.Option("--shard-mib", min=1, help="Size of a file of tensors.")] = 64,
    json_lines: Json = False,
) -> None:
    """Write recorded activations into a folder that pandas, polars, datasets and safetensors open.

    The topics' ends are fixed when it begins, and memory is bounded however much is read. What retention has deleted
    and every record that is left out are counted, printed and written into manifest.json. An export that was
    interrupted begins again when it is run into the same folder. Requests whose prompts are the same, or share 13 words
    in a row, are brought into one part.
    """
    # Imported here: `--help` needs neither a Kafka client nor pyarrow.
    check_writable(out, "OUT")
    from probe_consumers.dataset_export import export
    from probe_consumers.dataset_telling import as_json, told

    topics = read.topics(point)
    order = replace(topics.order, with_text=text, tensors_in_parquet=tensors_in_parquet, shard_bytes=shard_mib << 20)
    manifest = export(topics.source, topics.plan, order, out, partial(progress, "exporting"))
    sys.stdout.write(as_json(manifest) if json_lines else told(out, manifest))


@app.command("import")
def import_dataset(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the dataset.")],
    config: ConfigFile = None,
    points: PointsFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
    json_lines: Json = False,
) -> None:
    """Write the streams of a dataset onto the activations topics of a pipeline, where a replay reads them.

    The topics are created where they are missing. One that holds records already is refused: streams of one name would
    be mixed. Use another --prefix.
    """
    from dataclasses import asdict

    from probe_consumers.dataset_loading import import_folder
    from probe_consumers.dataset_telling import as_json
    from undercurrent.cli.planning import plan_of
    from undercurrent.pipeline import connection, interactive, read_sections

    sections = read_sections(config)
    plan = plan_of(sections, config, points, prefix)
    result = import_folder(folder, interactive(connection(sections, bootstrap_servers)), plan)
    if json_lines:
        sys.stdout.write(as_json(asdict(result)))
        return
    sys.stdout.write(f"{counted(result.streams, 'stream')}, {counted(result.messages, 'message')} written\n")
    for reason, count in result.altered.items():
        sys.stdout.write(
            f"{counted(count, 'stream')} ended with {reason!r}, written with the end that the engine gave\n"
        )


@app.command("erase")
def erase_from_dataset(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A dataset, or results of a replay.")],
    request_id: Annotated[
        list[str] | None,
        typer.Option("--request-id", help="Take this one out, and ask no broker; may be repeated."),
    ] = None,
    config: ConfigFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
    json_lines: Json = False,
) -> int:
    """Take requests out of a folder: all that are marked as erased on the topics, or those that are named.

    Marks are read from the pipeline that a dataset was exported from, and from that of --config or --prefix. A request
    that is named is taken out of this folder alone: `undercurrent erase` marks it, deletes what it can on the topics
    and takes folders too. Rows go, tensors are overwritten, sums and counts are written anew. Files that still name a
    request are printed, and the exit code is 1: delete them.
    """
    from probe_consumers.erase_cli import tell
    from undercurrent.evaluation.erasing import ErasedFolder, erase_from_folder, requests_in

    if request_id:
        if not all(request_id):
            raise ConfigError("--request-id: is empty")
        if unused := [name for name, given in (("--config", config), ("--prefix", prefix)) if given is not None]:
            raise ConfigError(f"{unused[0]}: says where to ask which requests are erased, but --request-id names some")
        there = requests_in(folder)
        for name in sorted(set(request_id) - there):
            sys.stderr.write(f"{folder}: no table holds request {name}\n")
        names = sorted(set(request_id))
    else:
        names = _marked(folder, config, prefix, bootstrap_servers)
    result = erase_from_folder(folder, *names) if names else ErasedFolder()
    tell(str(folder), result, as_json=json_lines)
    return 1 if result.left else 0


def _marked(folder: Path, config: Path | None, prefix: str | None, bootstrap_servers: str | None) -> list[str]:
    """Return the requests of a folder that the brokers say are erased."""
    from probe_consumers.dataset_erased import erased_in
    from undercurrent.cli.planning import plan_of
    from undercurrent.pipeline import connection, interactive, read_sections

    sections = read_sections(config)
    plan = plan_of(sections, config, None, prefix)
    return erased_in(folder, interactive(connection(sections, bootstrap_servers)), plan.prefix)


@app.command()
def info(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the dataset.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare each file with its sha256; exit 1 if one differs.")
    ] = False,
    json_lines: Json = False,
) -> int:
    """Say what a dataset holds, where it comes from and what was left out."""
    from probe_consumers.dataset_telling import as_json, told
    from undercurrent.evaluation.dataset_format import check_files, read_manifest

    manifest = read_manifest(folder)
    sys.stdout.write(as_json(manifest) if json_lines else told(folder, manifest))
    if not verify:
        return 0
    wrong = check_files(folder, manifest)
    for line in wrong:
        sys.stderr.write(line + "\n")
    if not wrong and not json_lines:
        sys.stdout.write(f"{counted(len(manifest['files']), 'file is', 'files are')} as the manifest says\n")
    return 1 if wrong else 0
