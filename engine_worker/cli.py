"""`undercurrent engine`: run prompts in an inference engine."""

from __future__ import annotations

import typer

from undercurrent.cli.options import Bootstrap, Engine, ServiceConfig, ServiceLogFormat

app = typer.Typer(help="Run prompts in an inference engine.", no_args_is_help=True, add_completion=False)


@app.callback()
def root() -> None:
    """Run prompts in an inference engine."""


@app.command()
def run(
    config: ServiceConfig,
    engine: Engine = None,
    log_format: ServiceLogFormat = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Run the engine worker that a file describes, until SIGTERM: finish or hand over what is in flight, and exit 0."""
    # Imported here: `--help` needs neither a Kafka client nor an engine.
    from engine_worker.__main__ import serve

    serve(config, bootstrap_servers, log_format, engine)
