"""`undercurrent broker`: a broker for development."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from undercurrent.testing.brokers import BrokerContext

app = typer.Typer(help="Start a broker for development.", no_args_is_help=True, add_completion=False)

POLL_S = 0.5
# Nobody kills this one and waits for it. With the two seconds of the brokers of tests its own controller takes it for
# dead on a busy machine: no partition has a leader then, and services end because no broker answers.
_PATIENT = {"broker.session.timeout.ms": "30000"}


class Kind(StrEnum):
    """Which broker."""

    AUTO = "auto"
    APACHE = "apache"
    EMBEDDED = "embedded"


@app.callback()
def root() -> None:
    """Start a broker for development."""


@app.command()
def up(
    kind: Annotated[
        Kind, typer.Option("--kind", help="auto: an Apache Kafka at KAFKA_HOME, else the embedded one.")
    ] = Kind.AUTO,
) -> int:
    """Run a single broker on a free port until Ctrl-C or SIGTERM; its data are gone afterwards.

    Development only. The first line on standard output is the address, for UNDERCURRENT_BOOTSTRAP_SERVERS.
    """
    from undercurrent.errors import UnreachableError
    from undercurrent.service.processes import StopRequest

    stop = StopRequest().install()
    with choose(kind) as broker:
        sys.stdout.write(f"{broker.bootstrap_servers}\n")
        sys.stdout.flush()
        sys.stderr.write(f"{note(broker.is_apache)}\n")
        while not stop.wait(POLL_S):
            if not broker.running:
                raise UnreachableError(f"the {broker.kind} broker ended: {broker.last_lines()}")
    return 0


def choose(kind: Kind) -> BrokerContext:
    """Return a broker that this machine can run; it starts when the context is entered.

    Raises:
        BrokerUnavailableError: the machine lacks what it needs.
    """
    from undercurrent.testing.brokers import BrokerUnavailableError, apache_kafka, embedded_broker, find_kafka_home

    if kind is Kind.AUTO:
        try:
            find_kafka_home()
        except BrokerUnavailableError:
            kind = Kind.EMBEDDED
        else:
            kind = Kind.APACHE
    return apache_kafka(properties=_PATIENT) if kind is Kind.APACHE else embedded_broker()


def note(apache: bool) -> str:
    """Return what a user has to know of the broker."""
    if apache:
        return "Apache Kafka, one node, development only: its data are gone when it ends. Ctrl-C ends it."
    return (
        "The embedded broker, development only: not durable, range groups alone, it does not fence a stale member, and "
        "a dead member's partitions stay its own. It answers fetches with more than was asked for, so clients need "
        "receive.message.max.bytes: 1000000000 under kafka:. Ctrl-C ends it."
    )
