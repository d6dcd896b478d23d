"""Fixtures of the embedded adapter's tests."""

from __future__ import annotations

import pytest

from tests.unit.undercurrent.adapters.embedded_doubles import Adapter, Keeper, Raiser
from undercurrent.core import ProbeRegistry
from undercurrent.router import Router


@pytest.fixture
def router():
    registry = ProbeRegistry()
    registry.register("keep", Keeper)
    registry.register("raise", Raiser)
    with Router(registry, worker_pool_size=2) as made:
        made.ended = {}
        made.on_request_end(made.ended.__setitem__)
        yield made


@pytest.fixture(scope="module")
def adapter():
    with Adapter() as made:
        made.load_model("fake")
        yield made
