"""Fixtures of the tests of rows that are held back."""

import pytest

from tests.unit.undercurrent.capture.holding_scene import Scene


@pytest.fixture
def scene():
    return Scene()
