"""A real Apache Kafka of several nodes, whose leaders tests can kill.

with apache_cluster(3) as cluster:             # KAFKA_HOME, and Java 17 or later
    settings = cluster.settings()
    cluster.node(leader).kill()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from undercurrent.kafka.client import KafkaSettings
from undercurrent.testing.brokers import (
    APACHE_PROPERTIES,
    Broker,
    find_kafka_home,
    formatted,
    listening,
    new_cluster_id,
)
from undercurrent.testing.servers import free_port, temporary_folder


@dataclass(frozen=True)
class Cluster:
    """Several brokers that are one Kafka.

    Attributes:
        brokers: its nodes; the first has the id 1.
    """

    brokers: tuple[Broker, ...]

    def settings(self, **options: str | float | bool) -> KafkaSettings:
        """Return the connection; `options` are librdkafka keys (use ** for those with dots)."""
        servers = ",".join(broker.bootstrap_servers for broker in self.brokers)
        return KafkaSettings.model_validate({"bootstrap_servers": servers, **options})

    def node(self, number: int) -> Broker:
        """Return the node of an id."""
        return self.brokers[number - 1]


@contextmanager
def apache_cluster(
    nodes: int = 3, *, properties: Mapping[str, str] | None = None, heap: str = "-Xms64m -Xmx384m"
) -> Iterator[Cluster]:
    """Run an Apache Kafka of several nodes for the block's time; what is acknowledged is on two of them.

    Args:
        nodes: how many.
        properties: server properties on top of `APACHE_PROPERTIES`.
        heap: each node's Java heap's options.

    Raises:
        BrokerUnavailableError: there is no Apache Kafka with Java; a container is not taken instead.
    """
    home = find_kafka_home()
    ports = [(free_port(), free_port()) for _ in range(nodes)]
    shared = {
        "controller.quorum.voters": ",".join(f"{at}@127.0.0.1:{ports[at - 1][1]}" for at in range(1, nodes + 1)),
        "min.insync.replicas": "2",
        **{key: str(nodes) for key in APACHE_PROPERTIES if key.endswith("replication.factor")},
        **{key: "2" for key in APACHE_PROPERTIES if key.endswith("log.min.isr")},
        **(properties or {}),
    }
    cluster_id = new_cluster_id()
    with temporary_folder("undercurrent-kafka-") as folder:
        brokers = []
        for at, (port, controller_port) in enumerate(ports, 1):
            home_of = folder / str(at)
            home_of.mkdir()
            where = listening({"PLAINTEXT": f"127.0.0.1:{port}"}, f"127.0.0.1:{controller_port}")
            environment = {"KAFKA_HEAP_OPTS": heap, "LOG_DIR": str(home_of)}
            own = {**where, "node.id": str(at), **shared}
            brokers.append(formatted(home, home_of, port, own, environment, cluster_id=cluster_id))
        try:
            for broker in brokers:
                broker.launch()
            for broker in brokers:
                broker.wait_serving()
            yield Cluster(tuple(brokers))
        finally:
            for broker in brokers:
                broker.kill()  # in good order each would wait for the others
