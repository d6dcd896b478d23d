"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from undercurrent.testing.brokers import BrokerUnavailableError
from undercurrent.testing.pytest_plugin import apache_broker, broker, embedded_broker, registry, topic_prefix

__all__ = ["apache_broker", "broker", "embedded_broker", "registry", "topic_prefix"]

PARTS = ("together", "alone", "faults")
"""A test with both marks is of the former."""

# On shared cores wall time per example says nothing; pytest-timeout bounds each test as a whole.
settings.register_profile("undercurrent", deadline=None)
settings.load_profile("undercurrent")

# Workers side by side have a core each: threads of two engines that spin on the same cores starve each other.
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER is not None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(int(WORKER.removeprefix("gw")) % (os.cpu_count() or 1))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let scripts/test.sh run the tests in parts."""
    parser.addoption("--part", choices=PARTS, help="run only the tests of this part")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the part that was asked for."""
    part = config.getoption("--part")
    if part is None:
        return
    parts: dict[str, list[pytest.Item]] = {name: [] for name in PARTS}
    for item in items:
        parts[next((name for name in PARTS[1:] if item.get_closest_marker(name)), PARTS[0])].append(item)
    items[:] = parts.pop(part)
    for others in parts.values():
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test that starts a broker of its own where this machine has none, with the reason."""
    try:
        return (yield)
    except BrokerUnavailableError as exc:
        pytest.skip(str(exc))
