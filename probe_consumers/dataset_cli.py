"""`undercurrent dataset`: recorded activations as a folder of tables and tensors, and back onto topics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile, PointsFile, Prefix

app = typer.Typer(
    help="Recorded activations as a folder of tables and tensors, and back.", no_args_is_help=True, add_completion=False
)

Folder = Annotated[Path, typer.Argument(file_okay=False, help="Folder of the dataset.")]
Json = Annotated[bool, typer.Option("--json", help="The manifest, or the result, as JSON.")]


@app.command("export")
def export_dataset(
    out: Folder,
    point: Annotated[
        list[str] | None, typer.Option("--point", help="Extraction point; may be repeated; all by default.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Records appended from this time on: ISO 8601, or Unix seconds.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Records appended before this time.")] = None,
    from_offset: Annotated[
        list[str] | None, typer.Option("--from-offset", help="First offset, or PARTITION:OFFSET; may be repeated.")
    ] = None,
    request: Annotated[list[str] | None, typer.Option("--request", help="Only this request; may be repeated.")] = None,
    group_by: Annotated[
        str, typer.Option("--group-by", help="Never in two parts: request_id, tenant, or a key of prompts' metadata.")
    ] = "request_id",
    split: Annotated[str, typer.Option("--split", help="Shares of fit, threshold and test.")] = "0.6,0.2,0.2",
    test_after: Annotated[
        str | None, typer.Option("--test-after", help="Groups with a request made from this time on are the test part.")
    ] = None,
    salt: Annotated[str, typer.Option("--salt", help="Another one draws another split.")] = "undercurrent",
    text: Annotated[bool, typer.Option("--text/--no-text", help="Prompts, metadata and what was generated.")] = True,
    tensors_in_parquet: Annotated[
        bool, typer.Option("--tensors-in-parquet", help="Values beside each token too, as lists of float32.")
    ] = False,
    shard_mib: Annotated[int, typer.Option("--shard-mib", min=1, help="Size of a file of tensors.")] = 64,
    config: ConfigFile = None,
    points: PointsFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
    json_lines: Json = False,
) -> None:
    """Write recorded activations into a folder that pandas, polars, datasets and safetensors open.

    The topics' ends are fixed when it begins, and memory is bounded however much is read. What retention has deleted
    and every record that is left out are counted, printed and written into manifest.json.
    """
    # Imported here: `--help` needs neither a Kafka client nor pyarrow.
    from probe_consumers.dataset_export import ExportOrder, export
    from probe_consumers.dataset_source import KafkaSource
    from probe_consumers.dataset_telling import as_json, told
    from probe_consumers.replay_range import RangeRequest, parse_offsets, parse_time
    from undercurrent.cli.planning import plan_of
    from undercurrent.evaluation.dataset_split import SplitRule, parse_shares
    from undercurrent.pipeline import connection, interactive, read_sections

    sections = read_sections(config)
    plan = plan_of(sections, config, points, prefix)
    order = ExportOrder(
        points=tuple(point or plan.points),
        range=RangeRequest(
            since_ms=None if since is None else parse_time(since),
            until_ms=None if until is None else parse_time(until),
            offsets=parse_offsets(from_offset or []),
        ),
        requests=frozenset(request or ()),
        out=out,
        split=SplitRule(
            group_by=group_by,
            shares=parse_shares(split),
            salt=salt,
            test_after_us=None if test_after is None else parse_time(test_after) * 1000,
        ),
        with_text=text,
        tensors_in_parquet=tensors_in_parquet,
        shard_bytes=shard_mib << 20,
    )
    manifest = export(KafkaSource(interactive(connection(sections, bootstrap_servers))), plan, order)
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
    sys.stdout.write(f"{result.streams} streams, {result.messages} messages written\n")
    for reason, count in result.altered.items():
        sys.stdout.write(
            f"{count} streams that ended with {reason!r} are written with the end that their engine gave\n"
        )


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
        sys.stdout.write(f"{len(manifest['files'])} files are as the manifest says\n")
    return 1 if wrong else 0
