"""What the tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from undercurrent.testing.brokers import Broker, apache_kafka
from undercurrent.testing.pytest_plugin import or_skip


@pytest.fixture(scope="session")
def patient_broker() -> Iterator[Broker]:
    """A broker that nobody kills: one that gets no time among many processes is not to be taken for dead."""
    yield from or_skip(apache_kafka(properties={"broker.session.timeout.ms": "30000"}))
