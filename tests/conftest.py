"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

from undercurrent.testing.pytest_plugin import apache_broker, broker, embedded_broker, topic_prefix

__all__ = ["apache_broker", "broker", "embedded_broker", "topic_prefix"]

# On shared cores wall time per example says nothing; pytest-timeout bounds each test as a whole.
settings.register_profile("undercurrent", deadline=None)
settings.load_profile("undercurrent")
