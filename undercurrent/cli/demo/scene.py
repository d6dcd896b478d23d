"""Which broker the demo runs on, and how it is started."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from undercurrent.cli.options import BOOTSTRAP_VARIABLE
from undercurrent.errors import UnreachableError
from undercurrent.kafka.client import Assignor
from undercurrent.testing.brokers import BrokerUnavailableError, find_kafka_home


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneBroker:
    """The broker of a demo.

    Args:
        kind: `given`, `apache` or `embedded`.
        title: for people.
        address: where it is, for one that runs already; another says it when it has started.
        assignor: how probe hosts' groups hand out partitions on it.
        options: librdkafka keys that every client needs with it.
    """

    kind: str
    title: str
    address: str | None = None
    assignor: Assignor = Assignor.COOPERATIVE_STICKY
    options: Mapping[str, str | int] = field(default_factory=dict)


def choose_broker(environment: Mapping[str, str] = os.environ) -> SceneBroker:
    """Return the broker that a variable names; else an Apache Kafka that is here; else the embedded one.

    Args:
        environment: where the variables stand.

    Raises:
        UnreachableError: there is none of the three.
    """
    if address := environment.get(BOOTSTRAP_VARIABLE):
        return SceneBroker(kind="given", title=f"the one at {BOOTSTRAP_VARIABLE}", address=address)
    try:
        home = find_kafka_home(environment.get("KAFKA_HOME", ""))
    except BrokerUnavailableError as exc:
        return _embedded(str(exc))
    return SceneBroker(kind="apache", title=f"Apache Kafka at {home}")


def _embedded(why: str) -> SceneBroker:
    if importlib.util.find_spec("noida_db") is None:
        raise UnreachableError(
            f"no broker: {BOOTSTRAP_VARIABLE} is not set, {why}, and the embedded one is not installed "
            '(pip install "undercurrent[embedded]")'
        )
    return SceneBroker(
        kind="embedded",
        title=f"the embedded one, for development only ({why})",
        assignor=Assignor.RANGE,
        # It answers a fetch with more than was asked for; librdkafka refuses above this limit.
        options={"receive.message.max.bytes": 1_000_000_000},
    )
