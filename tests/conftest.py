"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from undercurrent.testing.brokers import BrokerUnavailableError
from undercurrent.testing.pytest_plugin import apache_broker, broker, embedded_broker, topic_prefix

__all__ = ["apache_broker", "broker", "embedded_broker", "topic_prefix"]

# On shared cores wall time per example says nothing; pytest-timeout bounds each test as a whole.
settings.register_profile("undercurrent", deadline=None)
settings.load_profile("undercurrent")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test that starts a broker of its own where this machine has none, with the reason."""
    try:
        return (yield)
    except BrokerUnavailableError as exc:
        pytest.skip(str(exc))
