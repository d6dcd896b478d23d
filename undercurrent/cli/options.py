"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

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
