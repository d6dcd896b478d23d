"""`undercurrent plan`: what a deployment needs, before there is one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undercurrent.errors import ConfigError

if TYPE_CHECKING:
    from engine_worker.config import LimitsSection, PublisherSection

app = typer.Typer(help="Say what a deployment needs: bytes, disk, partitions, cores.", add_completion=False)


@app.command()
def plan(
    model: Annotated[str, typer.Option("--model", help="Folder of the model, or its config.json.")],
    spec: Annotated[Path, typer.Option("--spec", exists=True, dir_okay=False, help="Extraction points.")],
    tokens_per_s: Annotated[float, typer.Option("--tokens-per-s", help="Tokens generated, all requests together.")],
    requests_per_s: Annotated[float, typer.Option("--requests-per-s", help="Requests that begin.")],
    prompt_tokens: Annotated[float, typer.Option("--prompt-tokens", help="Of a request, on average.")],
    cached_tokens: Annotated[
        float, typer.Option("--cached-tokens", help="Of a prompt, read from the prefix cache: no row has them.")
    ] = 0.0,
    token_ms: Annotated[float, typer.Option("--token-ms", help="From one token of a request to its next.")] = 25.0,
    retention: Annotated[str, typer.Option("--retention", help="Of activations, as 1h.")] = "1d",
    replication: Annotated[int, typer.Option("--replication", min=1, help="Copies of each partition.")] = 3,
    partitions: Annotated[int, typer.Option("--partitions", min=1, help="Of each activations topic.")] = 4,
    partition_rate: Annotated[
        str, typer.Option("--partition-rate", help="Bytes a second that one partition is to take.")
    ] = "10 MiB",
    compression: Annotated[str, typer.Option("--compression", help="none, lz4 or zstd.")] = "lz4",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="What the model computes in; its configuration's without it.")
    ] = None,
    engines: Annotated[int, typer.Option("--engines", min=1, help="Engine workers that share the requests.")] = 1,
    disk: Annotated[
        str | None, typer.Option("--disk", help="Say which retention of activations fits, as 30 GiB for all brokers.")
    ] = None,
    probes: Annotated[
        Path | None, typer.Option("--probes", exists=True, dir_okay=False, help="A file of bindings: what probes cost.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the probes on this machine, 2 s each, and not take a table's word.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", exists=True, dir_okay=False, help="An engine worker's: sizes of its buffers."),
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Say what traffic needs: bytes a second of each topic, disk, partitions, network, probe cores, and buffers.

    Each figure comes with its formula and what was measured for it. No broker is asked and nothing is downloaded; the
    model's configuration is all that is read of it.
    """
    from engine_worker.planning import Asked, figures
    from engine_worker.planning_text import as_json, told
    from undercurrent.capacity.compression import check_codec
    from undercurrent.capacity.model import read_model
    from undercurrent.capacity.traffic import Traffic
    from undercurrent.capacity.units import parse_bytes, parse_duration
    from undercurrent.spec import load_yaml_file

    if measure and probes is None:
        raise ConfigError("--measure: there is nothing to time; --probes FILE names the probes")
    publisher, limits = _sections(config)
    asked = Asked(
        model=read_model(model, dtype),
        spec=load_yaml_file(spec),
        traffic=Traffic(
            requests_per_s=requests_per_s,
            tokens_per_s=tokens_per_s,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            token_ms=token_ms,
        ),
        retention_s=parse_duration(retention, "--retention"),
        replication=replication,
        partitions=partitions,
        partition_bytes_s=parse_bytes(partition_rate, "--partition-rate"),
        codec=check_codec(compression),
        engines=engines,
        disk_bytes=None if disk is None else parse_bytes(disk, "--disk"),
        probes=probes,
        measure=measure,
        publisher=publisher,
        delta_ms=limits.delta_interval_ms,
    )
    found = figures(asked)
    sys.stdout.write(as_json(found) if json_lines else told(asked, found))


def _sections(config: Path | None) -> tuple[PublisherSection, LimitsSection]:
    from engine_worker.config import LimitsSection, PublisherSection
    from undercurrent.pipeline import read_sections, validated

    sections = read_sections(config)
    return (
        validated(PublisherSection, sections.get("publisher") or {}, "publisher"),
        validated(LimitsSection, sections.get("limits") or {}, "limits"),
    )
