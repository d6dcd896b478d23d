"""`undercurrent probe import`: a direction from elsewhere as a folder that a probe host reads."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli import probe_options as common
from undercurrent.errors import ConfigError, ProbeError

if TYPE_CHECKING:
    from undercurrent.probes import LinearProbe

# What a probe's settings are called is what the options are called; the first is told after where it was given.
_FIELD = re.compile(r"(?:from_arrays: )?field '(\w+)'")

app = typer.Typer(help="Write a direction from elsewhere as a probe's folder.", add_completion=False)


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="The direction: .safetensors, .npy, .npz or .json.")
    ],
    out: common.OutFolder,
    layer: Annotated[int, typer.Option("--layer", min=0, help="0-based: the output of that decoder block.")],
    threshold: Annotated[float, typer.Option("--threshold", help="Aggregated score from which the probe acts.")],
    tensor_type: Annotated[str, typer.Option("--tensor-type", help="Which tensor of the layer.")] = "residual_stream",
    name: common.Name = None,
    version: common.Version = "1",
    tensor: Annotated[str | None, typer.Option("--tensor", help="Which tensor of a file with several.")] = None,
    row: Annotated[int | None, typer.Option("--row", min=0, help="Which row of a matrix.")] = None,
    bias: Annotated[float | None, typer.Option("--bias", help="Offset; the file's, or 0, without it.")] = None,
    aggregation: Annotated[
        str,
        typer.Option("--aggregation", help='A kind, or JSON as in probe.json: \'{"kind": "k_of_n", "k": 3, "n": 5}\'.'),
    ] = "max",
    positions: common.CountedPositions = common.Positions.ALL,
    mode: common.Mode = None,
    model: Annotated[
        Path | None, typer.Option("--model", exists=True, file_okay=False, help="Folder of the model it was fitted on.")
    ] = None,
    force: common.Force = False,
) -> None:
    """Write a direction from elsewhere as a probe's folder: score = weight . row + bias.

    Nothing in FILE is run: pickles are refused. Without --model the probe takes the streams of any model whose width
    fits; with it, those of this one only.
    """
    from undercurrent.probes import LinearProbe
    from undercurrent.probes.importing import read_direction

    common.check_folder(out, force)
    direction = read_direction(file, tensor, row)
    settings: dict[str, Any] = {
        "name": name or out.resolve().name,
        "version": version,
        "aggregation": common.parse_aggregation(aggregation),
        "positions": positions.value,
        "description": f"A direction from {file.name}{f', tensor {direction.tensor}' if direction.tensor else ''}.",
    }
    if mode is not None:
        settings["mode"] = mode.value
    if model is not None:
        from undercurrent.adapters.fingerprint import model_fingerprint

        settings["fingerprints"] = {"model": model_fingerprint(model)}
    offset = bias if bias is not None else direction.bias or 0.0
    try:
        made = LinearProbe.from_arrays(
            direction.weight, offset, layer=layer, tensor_type=tensor_type, threshold=threshold, **settings
        )
    except ProbeError as exc:
        raise ConfigError(_FIELD.sub(lambda field: f"--{field[1].replace('_', '-')}", str(exc))) from exc
    made.save(out)
    sys.stdout.write(_told(made, out))


def _told(made: LinearProbe, out: Path) -> str:
    config = made.artefact.config
    return (
        f"{out}: {config.name} {config.version}, width {made.artefact.width}, layer {config.layer} of "
        f"{config.tensor_type.value}, {config.aggregation.kind} >= {config.threshold}, "
        f"fingerprint {made.fingerprint[:12]}\n"
    )
