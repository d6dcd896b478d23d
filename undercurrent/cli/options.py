"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BOOTSTRAP_VARIABLE = "UNDERCURRENT_BOOTSTRAP_SERVERS"

Bootstrap = Annotated[
    str | None,
    typer.Option("--bootstrap-servers", "-b", envvar=BOOTSTRAP_VARIABLE, help="Brokers, as host:port,host:port."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", exists=True, dir_okay=False, help="Configuration in YAML.")
]
