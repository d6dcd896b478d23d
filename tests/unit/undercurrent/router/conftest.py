"""A world of scripted probes per test."""

from __future__ import annotations

import pytest

from tests.unit.undercurrent.router.router_doubles import World


@pytest.fixture
def world():
    made = World()
    yield made
    assert made.overlaps == 0
    for told in made.calls.values():
        # Whatever a test does, a probe is started at most once and ended at most once, and sees nothing afterwards.
        assert told.count("start") <= 1
        assert told.count("end") <= 1
        assert "end" not in told[:-1]


@pytest.fixture
def signals():
    """A log sink that keeps what it is told."""
    heard = []

    def sink(request_id, name, signal):
        heard.append((request_id, name, signal))

    sink.heard = heard
    return sink
