"""`undercurrent probes`: run probes on the activations of live requests."""

from __future__ import annotations

from typing import Annotated

import typer

from undercurrent.cli.options import Bootstrap, ServiceConfig, ServiceLogFormat

app = typer.Typer(help="Run probes on the activations of live requests.", no_args_is_help=True, add_completion=False)


@app.callback()
def root() -> None:
    """Run probes on the activations of live requests."""


@app.command()
def run(
    config: ServiceConfig,
    log_format: ServiceLogFormat = None,
    bootstrap_servers: Bootstrap = None,
    change: Annotated[
        bool, typer.Option("--change", help="Go on where another probe set has stopped; without it that is refused.")
    ] = False,
) -> None:
    """Run the probe host that a file describes, until SIGTERM: then finish the batch, commit it, and exit 0."""
    # Imported here: `--help` needs neither a Kafka client nor numpy.
    from probe_consumers.__main__ import serve

    serve(config, bootstrap_servers, log_format, change=change)
