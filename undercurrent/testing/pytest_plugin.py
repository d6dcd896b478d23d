"""Broker fixtures for pytest; import those you want into a conftest.

    from undercurrent.testing.pytest_plugin import apache_broker, broker, topic_prefix  # noqa: F401

The others are `embedded_broker` and `registry`, a schema registry. One server of each kind serves the whole session, so
a test takes names of its own (`topic_prefix`), and one that kills a server starts its own, with
`undercurrent.testing.brokers.apache_kafka` or `registries.apicurio_registry`. What this machine cannot run is skipped,
with the reason.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import pytest

from undercurrent.testing import brokers, registries
from undercurrent.testing.brokers import Broker, BrokerUnavailableError
from undercurrent.testing.registries import RegistryServer

T = TypeVar("T")


@pytest.fixture(scope="session")
def apache_broker() -> Iterator[Broker]:
    """A real Apache Kafka."""
    yield from or_skip(brokers.apache_kafka())


@pytest.fixture(scope="session")
def embedded_broker() -> Iterator[Broker]:
    """The embedded broker: not durable, range groups only, does not fence."""
    yield from or_skip(brokers.embedded_broker())


@pytest.fixture(scope="session", params=["embedded", "apache"])
def broker(request: pytest.FixtureRequest) -> Broker:
    """Each kind of broker in turn."""
    kind: Broker = request.getfixturevalue(f"{request.param}_broker")
    return kind


@pytest.fixture(scope="session")
def registry() -> Iterator[RegistryServer]:
    """A real Apicurio Registry, in memory; a test that stops one starts its own."""
    yield from or_skip(registries.apicurio_registry())


@pytest.fixture
def topic_prefix() -> str:
    """A prefix for topics, groups and transactional ids that no other test uses."""
    return f"t{uuid.uuid4().hex[:10]}"


def or_skip(context: AbstractContextManager[T]) -> Iterator[T]:
    """Run a server for a fixture of your own; where this machine cannot, the test is skipped with the reason."""
    try:
        started = context.__enter__()
    except BrokerUnavailableError as exc:
        pytest.skip(str(exc))
    try:
        yield started
    finally:
        context.__exit__(None, None, None)
