"""`undercurrent probe precision PROBE SOURCE`: what a coarser recording costs a probe, and what it saves."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probe_consumers.recording_options import SOURCE_HELP, SourceOptions
from undercurrent.cli.grouping import with_options
from undercurrent.cli.options import check_writable
from undercurrent.cli.probe_options import chosen_point, options_named
from undercurrent.cli.progress import progress
from undercurrent.cli.tables import write_table
from undercurrent.counts import counted
from undercurrent.errors import ConfigError

if TYPE_CHECKING:
    from undercurrent.evaluation.carrying import Carried
    from undercurrent.evaluation.dataset import Dataset
    from undercurrent.evaluation.precision import Precision, Row

app = typer.Typer(help="Say what a coarser recording costs a probe, and saves.", add_completion=False)

_PARTS = ("threshold", "test")


@app.command()
@with_options("read", SourceOptions)
def precision(
    probe: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the probe.")],
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    label: Annotated[str, typer.Option("--label", help="Name of the label that AUROC is about.")],
    point: Annotated[str | None, typer.Option("--point", help="Extraction point; the only one without it.")] = None,
    project: Annotated[
        list[int] | None,
        typer.Option("--project", min=1, help="Elements of randomly projected rows; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of projections and intervals.")] = 0,
    part: Annotated[
        str, typer.Option("--part", help="Requests that are scored: threshold, or test, whose reading is counted.")
    ] = "threshold",
    save_projection: Annotated[
        Path | None,
        typer.Option("--save-projection", file_okay=False, help="Folder for each projection and the probe that fits."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the projections that are in the folder.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    *,
    read: SourceOptions,
) -> None:
    """Run a probe on recorded rows as float16, as int8 and randomly projected, and compare scores and decisions.

    The rows go through the code that an engine publishes them with. Which to use is a choice, so it is made on the
    threshold split; the test split stays unread unless --part test asks for it. A linear probe is carried over to
    projected rows by least squares on its own scores of the fit split, which keeps its threshold; other probes are not.
    """
    sizes = _checked(project or [], part, save_projection, force)
    from probe_consumers.recorded import recorded
    from undercurrent.evaluation.precision import Order, measure
    from undercurrent.probes.loading import class_of_folder

    loaded = class_of_folder(probe).from_folder(probe)
    with (
        options_named(),
        recorded(read.source(source), keep=read.dataset, progress=partial(progress, "exporting")) as data,
    ):
        name = chosen_point(data, point)
        found = measure(loaded, data, name, label, Order(projections=sizes, seed=seed, split=part))
        if part == "test":
            data.count_test_read(f"probe precision: {loaded.artefact.config.name}, label {label}")
        rows = [(row, wire_bytes(row, found, data, name)) for row in found.rows]
    saved = _save(found.carried, save_projection)
    if json_lines:
        from undercurrent.cli.jsonl import dumps

        sys.stdout.write(dumps(as_json(found, rows, saved)) + "\n")
        return
    _write(loaded.artefact.config.name, name, found, rows)
    sys.stdout.writelines(
        f"{folder}: publish with reduce: {{project: {folder / 'projection.safetensors'}}} and bind {folder / 'probe'}\n"
        for folder in saved
    )


def _checked(sizes: list[int], part: str, folder: Path | None, force: bool) -> tuple[int, ...]:
    if part not in _PARTS:
        raise ConfigError(f"--part: {part!r}; accepted: {', '.join(_PARTS)}")
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"--project: {', '.join(map(str, sizes))}; accepted: each size once")
    if folder is not None and not sizes:
        raise ConfigError("--save-projection: there is no --project to save")
    if folder is not None:
        check_writable(folder, "--save-projection")
    there = [] if folder is None or force else [size for size in sizes if (folder / str(size)).exists()]
    if folder is not None and there:
        raise ConfigError(f"--save-projection: {folder / str(there[0])} is there already; --force replaces it")
    return tuple(sizes)


def _save(carried: tuple[Carried, ...], folder: Path | None) -> list[Path]:
    saved = []
    for one in carried if folder is not None else ():
        if one.probe is not None and folder is not None:
            path = folder / str(one.probe.artefact.width)
            one.save(path)
            saved.append(path)
    return saved


@dataclasses.dataclass(frozen=True, slots=True)
class WireBytes:
    """Bytes of a token on the wire, on average over the recorded requests, before compression.

    Args:
        values: of the layers that the point has.
        overhead: positions, token ids, framing of messages, and what Kafka stores of a record.
    """

    values: float
    overhead: float


def wire_bytes(row: Row, found: Precision, data: Dataset, point: str) -> WireBytes | None:
    """Return what a point would take on the wire, had it published its rows in a given way.

    A prompt is taken for one record, and each generated token for another, as an engine without long prompts has them.
    None where nothing was recorded.
    """
    from undercurrent.capacity.wire import Stream, StreamSizes

    kind = data.manifest["points"][point][0]
    layers = tuple(kind["layers"])
    sizes = StreamSizes(
        Stream(
            point=point,
            tensor_type=kind["tensor_type"],
            layers=layers,
            width=row.width,
            dtype=row.dtype,
            row_bytes=len(layers) * row.row_bytes,
            row_shape=() if row.width != kind["width"] else tuple(kind["row_shape"]),
        )
    )
    tokens = sum(found.prompt_rows) + sum(found.generated_rows)
    if not tokens:
        return None
    total = sum(
        sizes.total([prompt] * bool(prompt) + [1] * generated)
        for prompt, generated in zip(found.prompt_rows, found.generated_rows, strict=True)
    )
    values = float(len(layers) * row.row_bytes)
    return WireBytes(values, total / tokens - values)


Rows = list[tuple["Row", WireBytes | None]]


def as_json(found: Precision, rows: Rows, saved: list[Path]) -> dict[str, Any]:
    """Return what was measured as plain data."""
    facts = dataclasses.asdict(dataclasses.replace(found, rows=(), carried=()))
    for name in ("rows", "carried", "prompt_rows", "generated_rows"):
        del facts[name]
    facts |= {"layers": list(found.layers), "spread": found.spread if found.spread == found.spread else None}
    return {
        **facts,
        "encodings": [
            dataclasses.asdict(row)
            | {"drift": None if row.drift is None else _drift_json(row.drift.quantiles, row.drift.most)}
            | {"bytes_per_token": None if size is None else dataclasses.asdict(size)}
            for row, size in rows
        ],
        "saved": [str(path) for path in saved],
    }


def _drift_json(quantiles: Mapping[float, float], most: float) -> dict[str, float]:
    return {f"p{100 * share:g}": value for share, value in quantiles.items()} | {"max": most}


def _write(probe: str, point: str, found: Precision, rows: Rows) -> None:
    sys.stdout.write(
        f"{probe} at point {point}, layer {','.join(map(str, found.layers))}, recorded as {found.recorded}: "
        f"{counted(found.requests, 'request')}, {found.positives:,} positive, {found.negatives:,} negative; "
        f"it acts on {found.acts:,} at {found.threshold:.6g}\n"
        f"score drift in units of the scores' standard deviation, {found.spread:.4g}; bytes a token before "
        f"compression\n\n"
    )
    write_table([_cells(row, size) for row, size in rows])
    sys.stdout.writelines(f"{row.name}: {row.unavailable}\n" for row, _ in rows if row.unavailable)
    sys.stdout.writelines(
        f"{row.name}: the carried probe explains {row.kept:.2%} of the variance of single rows' scores\n"
        for row, _ in rows
        if row.kept is not None
    )
    sys.stdout.writelines(
        f"{row.name}: the probe ends {counted(row.failed, 'request')} with an error\n" for row, _ in rows if row.failed
    )


def _cells(row: Row, size: WireBytes | None) -> dict[str, object]:
    drift = row.drift
    moved = {} if drift is None else _drift_json(drift.quantiles, drift.most)
    return {
        "encoding": row.name,
        "width": row.width,
        "values": "n/a" if size is None else f"{size.values:,.0f}",
        "overhead": "n/a" if size is None else f"{size.overhead:,.0f}",
        "AUROC": "n/a" if row.auroc is None else str(row.auroc),
        "change": "-" if row.auroc_change is None else str(row.auroc_change),
        **{name: f"{moved[name]:.2g}" if name in moved else "n/a" for name in ("p50", "p95", "p99", "max")},
        "acts too": "n/a" if row.auroc is None else row.acts_too,
        "acts no more": "n/a" if row.auroc is None else row.acts_no_more,
    }
