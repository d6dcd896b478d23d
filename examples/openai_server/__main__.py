"""Start the server: `python -m examples.openai_server --model MODEL --points points.yaml`."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from starlette.types import ASGIApp

from undercurrent.adapters.embedded import EmbeddedAdapter
from undercurrent.cli.running import run
from undercurrent.errors import ConfigError
from undercurrent.router import Router
from undercurrent.service.logging import LogFormat, setup_logging
from undercurrent.service.processes import StopRequest
from undercurrent.spec import ProbeSpec, load_yaml_file

from .app import MAX_BODY_BYTES, create_app
from .generation import Service
from .probes import bind
from .scores import Reporter

logger = logging.getLogger(__name__)

PROG_NAME = "openai_server"

app = typer.Typer(add_completion=False)


class EngineKind(StrEnum):
    """What runs the model."""

    VLLM = "vllm"
    HF = "hf"


def make_adapter(kind: EngineKind) -> EmbeddedAdapter:
    """Return an adapter without a model."""
    if kind is EngineKind.HF:
        from undercurrent.adapters.hf import HFEngineAdapter

        return HFEngineAdapter()
    from undercurrent.adapters.vllm import VLLMEngineAdapter

    return VLLMEngineAdapter()


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="Folder or name of the model.")],
    points: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Extraction points with a probe_type each.")
    ] = None,
    probe: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FOLDER or NAME=module:Class: what a probe_type of the points means."),
    ] = None,
    engine: Annotated[EngineKind, typer.Option(help="What runs the model.")] = EngineKind.VLLM,
    engine_args: Annotated[str, typer.Option(help="The engine's own arguments, as JSON.")] = "{}",
    served_name: Annotated[str | None, typer.Option(help="What clients call the model; --model without it.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="UNDERCURRENT_API_KEY", help="What clients must send; better given by the variable."),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Longest request body.")] = MAX_BODY_BYTES,
    drain_s: Annotated[int, typer.Option(min=1, help="How long running requests may take after a stop.")] = 30,
    log_format: Annotated[LogFormat, typer.Option(help="How the log looks.")] = LogFormat.TEXT,
) -> None:
    """Serve a model with OpenAI's API, and let probes watch and stop what it writes."""
    setup_logging(log_format, service=PROG_NAME)
    if api_key is not None and not api_key.strip():
        raise ConfigError("--api-key is empty; leave it out to let everybody in")
    spec = ProbeSpec() if points is None else load_yaml_file(points)
    probes = bind(spec, Path() if points is None else points.parent, _pairs(probe or []))
    arguments = _engine_args(engine_args)
    # The model takes its time: a port that is taken is said before.
    _listener(host, port).close()
    with make_adapter(engine) as adapter, Router(probes.registry) as router:
        adapter.load_model(model, **arguments)
        probes.check(adapter.info)
        adapter.register_extraction("start", probes.points)
        adapter.unregister_extraction("start")
        service = Service(adapter, router, probes.points, Reporter(probes.names), served_name or model)
        asgi = create_app(service, api_key=api_key, max_body_bytes=max_body_bytes, on_stop=adapter.shutdown)
        _run(asgi, _listener(host, port), drain_s)


def _run(asgi: ASGIApp, listener: socket.socket, drain_s: int) -> None:
    # uvicorn raises the signal that stopped it once more at its end: by default that would end the process right there.
    StopRequest().install()
    # The root logger has its own format, and a filter that keeps out what clients write.
    logging.getLogger("uvicorn.error").addFilter(_without_colours)
    config = uvicorn.Config(asgi, log_config=None, timeout_graceful_shutdown=drain_s)
    logger.info("serving at http://%s:%d", *listener.getsockname()[:2])
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


def _without_colours(record: logging.LogRecord) -> bool:
    # uvicorn says everything twice; its own formatter would take the one for terminals out.
    vars(record).pop("color_message", None)
    return True


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for name, _, reference in pairs:
        if not name or not reference:
            raise ConfigError(f"--probe {name!r:.80}; accepted: NAME=FOLDER or NAME=module:Class")
    return {name: reference for name, _, reference in pairs}


def _engine_args(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"--engine-args: is not JSON: {exc}") from exc
    if not isinstance(arguments, dict):
        raise ConfigError('--engine-args: accepted: a JSON object, such as {"max_model_len": 2048}')
    return arguments


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that is bound, and listens when uvicorn has started.

    Raises:
        ConfigError: the address or the port cannot be had.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise ConfigError(f"cannot listen at {host}:{port}: {exc.strerror}") from exc
    return listener


def main() -> None:
    """Run the command line of this process and exit with its code."""
    sys.exit(run(app, PROG_NAME, group=False))


if __name__ == "__main__":
    main()
