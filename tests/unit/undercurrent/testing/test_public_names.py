"""What `undercurrent.testing` offers, and what it costs to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import undercurrent.testing as testing


def test_every_public_name_is_there_and_listed():
    assert {name for names in testing._MODULES.values() for name in names} == set(testing.__all__)
    for name in testing.__all__:
        assert getattr(testing, name).__name__ == name
        assert name in dir(testing)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        testing.nothing  # noqa: B018


def test_a_test_of_a_probe_needs_neither_torch_nor_an_engine_and_the_package_itself_nearly_nothing():
    code = """
import sys
import undercurrent.testing as testing
assert "numpy" not in sys.modules
from undercurrent.core import probe
from undercurrent.probes import Binding

@probe("quiet")
def quiet(record):
    return 0.5

records = testing.make_records([[0.0, 1.0]])
assert testing.drive(quiet, records).scores == {(0, 0): 0.5}
ring = testing.MemoryRing([testing.make_point()], [Binding(name="q", point="residual", probe="quiet")])
ring.send(*testing.stream_messages(records))
assert ring.scores("request-1", "q") == {(0, 0): 0.5}
heavy = {"torch", "transformers", "vllm", "engine_worker", "noida_db", "testcontainers"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
