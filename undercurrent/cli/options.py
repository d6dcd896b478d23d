"""Options that several commands share."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from undercurrent.errors import ConfigError
from undercurrent.service.logging import LogFormat

BOOTSTRAP_VARIABLE = "UNDERCURRENT_BOOTSTRAP_SERVERS"


class EngineKind(StrEnum):
    """Which engine runs the model: `hf` needs no vLLM, `fake` has scripted tokens and is for tests."""

    VLLM = "vllm"
    HF = "hf"
    FAKE = "fake"


Bootstrap = Annotated[
    str | None,
    typer.Option("--bootstrap-servers", "-b", envvar=BOOTSTRAP_VARIABLE, help="Brokers, as host:port,host:port."),
]
ServiceConfig = Annotated[
    Path, typer.Option("--config", "-c", exists=True, dir_okay=False, help="Configuration in YAML.")
]
ServiceLogFormat = Annotated[
    LogFormat | None, typer.Option("--log-format", help="How the log looks; the configuration's without it.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", exists=True, dir_okay=False, help="Configuration in YAML.")
]
Engine = Annotated[
    EngineKind | None,
    typer.Option("--engine", help="What runs the model; the configuration's engine.kind without it. hf needs no vLLM."),
]
PointsFile = Annotated[
    Path | None,
    typer.Option("--points", exists=True, dir_okay=False, help="Extraction points, instead of the configuration's."),
]
Prefix = Annotated[
    str | None, typer.Option("--prefix", help="First part of each name, instead of the configuration's.")
]


def check_writable(path: Path, option: str) -> None:
    """Refuse a file or folder that cannot be made or written to; what is there is left alone.

    Raises:
        ConfigError: naming the option, and the folder that is in the way.
    """
    there = path if path.is_dir() else path.absolute().parent
    while not (there.exists() or there.is_symlink()):
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{option} {path}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: {there} may not be written to by this user, or lies on a read-only disk")
