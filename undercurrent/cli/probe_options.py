"""Options that the commands of `undercurrent probe` share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.options import check_writable
from undercurrent.errors import ChoiceError, ConfigError

if TYPE_CHECKING:
    from undercurrent.evaluation.dataset import Dataset


class Positions(StrEnum):
    """Which tokens count."""

    ALL = "all"
    GENERATED = "generated"
    PROMPT = "prompt"


class ProbeMode(StrEnum):
    """What a probe is meant to do."""

    SHADOW = "shadow"
    FLAG = "flag"
    ABORT = "abort"


OutFolder = Annotated[Path, typer.Option("--out", "-o", file_okay=False, help="Folder to write.")]
Name = Annotated[str | None, typer.Option("--name", help="Its name; the folder's without it.")]
Version = Annotated[str, typer.Option("--version", help="Its version.")]
CountedPositions = Annotated[Positions, typer.Option("--positions", help="Which tokens count.")]
Mode = Annotated[ProbeMode | None, typer.Option("--mode", help="What it is meant to do.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the probe that is in the folder.")]


def check_folder(out: Path, force: bool) -> None:
    """Refuse to write over a probe that nobody said may go, and where nothing can be written, before any work is done.

    Raises:
        ConfigError: there is one, or the folder cannot be written to.
    """
    from undercurrent.probes.folder import CONFIG_NAME

    if (out / CONFIG_NAME).exists() and not force:
        raise ConfigError(f"--out: there is a probe in {out}; --force replaces it")
    check_writable(out, "--out")


def parse_aggregation(text: str) -> Mapping[str, Any]:
    """Return an aggregation as it stands in `probe.json`, from its kind alone or from JSON.

    Raises:
        ConfigError: it begins like JSON and is none.
    """
    if not text.lstrip().startswith("{"):
        return {"kind": text}
    try:
        found: Mapping[str, Any] = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"--aggregation: {text!r:.100} is no JSON: {exc}") from exc
    return found


@contextmanager
def options_named() -> Iterator[None]:
    """Say by which option something was asked for that the data does not have: a usage error.

    Raises:
        ConfigError: naming the option.
    """
    try:
        yield
    except ChoiceError as exc:
        raise ConfigError(f"--{exc.field}: {exc}") from exc


def chosen_point(data: Dataset, point: str | None) -> str:
    """Return the point that was asked for, or the only one of a dataset.

    Raises:
        ConfigError: none was asked for, and there are several.
    """
    if point is not None:
        return point
    if len(data.points) != 1:
        raise ConfigError(f"--point: which of {', '.join(data.points) or 'none'}?")
    return data.points[0]
