"""Times that a person gives."""

from __future__ import annotations

import time

import pytest

from undercurrent.cli.times import parse_time
from undercurrent.errors import ConfigError


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("2d", 172_800)])
def test_a_time_may_be_so_long_ago(text, seconds):
    before = time.time() * 1000
    found = parse_time(text)
    assert before - seconds * 1000 - 1 <= found <= time.time() * 1000 - seconds * 1000


@pytest.mark.parametrize("text", ["5 m", "-5m", "m", "5w"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ConfigError, match="30m, 6h, 2d"):
        parse_time(text)
