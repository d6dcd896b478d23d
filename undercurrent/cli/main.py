"""The command tree: `undercurrent`, `python -m undercurrent.cli`."""

from __future__ import annotations

import sys
from typing import Annotated, ClassVar

import typer

from undercurrent.cli.lazy import LazyCommand, LazyGroup
from undercurrent.cli.running import run

PROG_NAME = "undercurrent"


class Tree(LazyGroup):
    """Every command, in the order in which one meets them."""

    table: ClassVar[dict[str, LazyCommand]] = {
        "demo": LazyCommand(
            target="undercurrent.cli.demo.command:app", help="Watch a probe in another process stop a real model."
        ),
        "init": LazyCommand(target="undercurrent.cli.init:app", help="Write the files of a new deployment."),
        "config": LazyCommand(target="undercurrent.cli.config:app", help="Check configuration files.", group=True),
        "validate": LazyCommand(
            target="undercurrent.cli.validate:app", help="Check extraction points and what is bound to them."
        ),
        "schema": LazyCommand(target="undercurrent.cli.schema:app", help="Print the JSON Schema of extraction points."),
        "inspect-model": LazyCommand(
            target="undercurrent.cli.inspect_model:app", help="Show what can be captured of a model."
        ),
        "doctor": LazyCommand(
            target="undercurrent.cli.doctor.command:app", help="Load a model and check that what is captured is right."
        ),
        "broker": LazyCommand(target="undercurrent.cli.broker:app", help="Start a broker for development.", group=True),
        "topics": LazyCommand(
            target="undercurrent.cli.topics:app", help="Plan, create and check the topics.", group=True
        ),
        "groups": LazyCommand(
            target="undercurrent.cli.groups:app", help="Show where consumer groups stand, and move them.", group=True
        ),
        "plan": LazyCommand(
            target="engine_worker.plan_cli:app", help="Say what a deployment needs: bytes, disk, partitions, cores."
        ),
        "engine": LazyCommand(
            target="engine_worker.cli:app",
            help="Run an engine worker: prompts in, tokens and activations out.",
            group=True,
        ),
        "engines": LazyCommand(
            target="engine_worker.engines_cli:app", help="Which engines there are; take one away for good.", group=True
        ),
        "probes": LazyCommand(
            target="probe_consumers.cli:app", help="Run probes on the activations of live requests.", group=True
        ),
        "probe": LazyCommand(
            target="undercurrent.cli.probe:app", help="Train, judge, import and roll out probes.", group=True
        ),
        "prompts": LazyCommand(
            target="producer.cli:app", help="Send prompts and follow what is generated.", group=True
        ),
        "abort": LazyCommand(target="producer.abort_cli:app", help="Stop requests, running, waiting or still to come."),
        "replay": LazyCommand(
            target="probe_consumers.replay_cli:app", help="Run probes again on recorded activations and compare."
        ),
        "dataset": LazyCommand(
            target="probe_consumers.dataset_cli:app", help="Recorded activations as a folder, and back.", group=True
        ),
        "labels": LazyCommand(
            target="probe_consumers.labels_cli:app", help="Label requests, at once or days later.", group=True
        ),
        "erase": LazyCommand(
            target="probe_consumers.erase_cli:app", help="Take a request out, and say when the rest of it is gone."
        ),
        "status": LazyCommand(
            target="undercurrent.cli.status:app", help="Show how far every part is, and what is not well."
        ),
        "explain": LazyCommand(
            target="undercurrent.cli.explain:app", help="Show what happened to one request, over all topics."
        ),
        "audit": LazyCommand(
            target="undercurrent.cli.audit:app", help="List every request whose record breaks a promise."
        ),
        "dlq": LazyCommand(
            target="undercurrent.cli.dlq:app", help="Look at dead letters, and write them back.", group=True
        ),
        "tail": LazyCommand(target="undercurrent.cli.tail:app", help="Print a topic's messages as JSON lines."),
    }


app = typer.Typer(
    name=PROG_NAME,
    cls=Tree,
    help="Activation probes on live LLM inference: captured in vLLM, published to Kafka, judged outside the engine.",
    add_completion=False,
    no_args_is_help=True,
)


def _show_version(value: bool) -> None:
    if value:
        # Imported here: reading the metadata of installed packages is slower than everything else in --help.
        from importlib.metadata import version

        sys.stdout.write(f"undercurrent {version('undercurrent')}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Activation probes on live LLM inference: captured in vLLM, published to Kafka, judged outside the engine."""


def main() -> None:
    """Run the command line of this process and exit with its code."""
    sys.exit(run(app, PROG_NAME))


if __name__ == "__main__":
    main()
