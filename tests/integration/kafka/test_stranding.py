"""Producers that do not get on, told apart: the cluster is gone, or only they do not find it."""

from __future__ import annotations

import pytest

import undercurrent.kafka.bulk as bulk
from undercurrent.errors import ProducerFatalError
from undercurrent.kafka.bulk import BulkPublisher, Outgoing
from undercurrent.kafka.client import KafkaSettings, idempotent_producer_config, make_producer
from undercurrent.kafka.records import Partition
from undercurrent.kafka.stranding import is_stranded
from undercurrent.testing.brokers import Broker

pytestmark = [pytest.mark.kafka, pytest.mark.alone]

NOWHERE = KafkaSettings(bootstrap_servers="127.0.0.1:1")


def test_a_producer_is_stranded_where_another_client_reaches_the_cluster(broker: Broker) -> None:
    lost = make_producer(idempotent_producer_config(NOWHERE))
    well = make_producer(idempotent_producer_config(broker.settings()))
    assert is_stranded(broker.settings(), lost, 1.0)
    assert not is_stranded(broker.settings(), well, 10.0)
    assert not is_stranded(NOWHERE, lost, 0.2)
    for producer in (lost, well):
        producer.close()


def test_a_bulk_publisher_waits_for_a_cluster_that_is_gone_and_not_where_only_it_is_lost(
    apache_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "_ASK_INTERVAL_S", 0.0)
    publisher = BulkPublisher(NOWHERE)
    cycle = {Partition("t", 0): [Outgoing(None, b"1")]}

    class EnoughError(Exception):
        pass

    def wait(waited_s: float) -> None:
        if waited_s > 0.5:
            raise EnoughError

    for mine in (cycle, {Partition("t", 0): [Outgoing(None, bytes(400_000))] * 3}):
        with pytest.raises(EnoughError):
            publisher.write(mine, waiting=wait)
    publisher._settings = apache_broker.settings()
    with pytest.raises(ProducerFatalError, match="lost its brokers"):
        publisher.write(cycle)
