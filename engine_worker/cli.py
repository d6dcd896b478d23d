"""`undercurrent engine`: run prompts in an inference engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undercurrent.cli.options import Bootstrap
from undercurrent.service.logging import LogFormat

app = typer.Typer(help="Run prompts in an inference engine.", no_args_is_help=True, add_completion=False)


@app.callback()
def root() -> None:
    """Run prompts in an inference engine."""


@app.command()
def run(
    config: Annotated[Path, typer.Option("--config", "-c", exists=True, dir_okay=False, help="Configuration in YAML.")],
    log_format: Annotated[
        LogFormat | None, typer.Option("--log-format", help="How the log looks; the configuration's without it.")
    ] = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Run the engine worker that a file describes, until SIGTERM: finish or hand over what is in flight, and exit 0."""
    # Imported here: `--help` needs neither a Kafka client nor an engine.
    from engine_worker.__main__ import serve

    serve(config, bootstrap_servers, log_format)
