"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undercurrent.service.logging import LogFormat

BOOTSTRAP_VARIABLE = "UNDERCURRENT_BOOTSTRAP_SERVERS"

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
