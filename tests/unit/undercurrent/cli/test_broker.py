"""Which broker `undercurrent broker up` starts, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from undercurrent.cli.broker import Kind, choose


def test_a_busy_machine_does_not_take_its_own_broker_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Mapping[str, str]] = []

    @contextmanager
    def apache_kafka(*, properties: Mapping[str, str]) -> Iterator[None]:
        started.append(properties)
        yield

    monkeypatch.setattr("undercurrent.testing.brokers.apache_kafka", apache_kafka)
    with choose(Kind.APACHE):
        pass
    (properties,) = started
    assert int(properties["broker.session.timeout.ms"]) >= 30_000
