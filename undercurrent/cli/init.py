"""`undercurrent init DIR --model PATH_OR_ID`: the files of a deployment, to be read and changed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from undercurrent.cli.scaffold import Deployment, usual_layer
from undercurrent.errors import ConfigError
from undercurrent.files import together, write_text

app = typer.Typer(add_completion=False)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to; it is made if it is not there.")],
    model: Annotated[str, typer.Option("--model", help="Folder of the model, or its name on a hub.")],
    layer: Annotated[
        int | None,
        typer.Option("--layer", min=0, help="Layer to capture; without it the model's configuration is looked at."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Write engine.yaml, points.yaml, probes.yaml with a first probe in shadow mode, host.yaml and a Compose file.

    No file that is there is touched without --force. What it writes can be run at once.
    """
    files = plan(model, layer).files()
    write(folder, files, force=force)
    sys.stdout.writelines(f"{folder / name}\n" for name in files)
    sys.stderr.write(f"next: undercurrent config check {folder}\n")


def plan(model: str, layer: int | None) -> Deployment:
    """Return the deployment of a model.

    Raises:
        ConfigError: there is no such model, or nobody can say how many layers it has.
        CaptureError: its configuration does not say how many layers it has.
    """
    if not model.strip():
        raise ConfigError("--model: is empty; accepted: a folder, or a name like org/model")
    folder = Path(model).expanduser()
    is_folder = folder.is_dir()
    named = str(folder.resolve()) if is_folder else model
    if layer is not None:
        return Deployment(model=named, is_folder=is_folder, layer=layer)
    layers = _layers(model)
    return Deployment(model=named, is_folder=is_folder, layer=usual_layer(layers), layers=layers)


def _layers(model: str) -> int:
    try:
        from undercurrent.adapters.hf.inspect import read_config, shape_of
    except ImportError as exc:
        reason = f"looking at a model needs torch and transformers ({exc})"
        raise ConfigError(f"{reason}: give --layer, or pip install 'undercurrent[hf]'") from exc
    return shape_of(read_config(model), model)[0]


def write(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Write files to a folder.

    Raises:
        ConfigError: one is there already, and nothing was written; or the folder cannot be written to.
    """
    there = [name for name in files if (folder / name).exists() or (folder / name).is_symlink()]
    if there and not force:
        raise ConfigError(f"{folder}: {', '.join(there)} already there; --force overwrites")
    try:
        with together(folder) as fresh:
            for name, text in files.items():
                write_text(fresh / name, text)
    except OSError as exc:
        raise ConfigError(f"{exc.filename or folder}: cannot be written: {exc.strerror}") from exc
