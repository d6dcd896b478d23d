"""Durations and sizes as people write them."""

from __future__ import annotations

import pytest

from undercurrent.capacity.units import parse_bytes, parse_duration, shown_bytes, shown_duration
from undercurrent.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h", 3600), ("500ms", 0.5), (" 7 d ", 7 * 86_400), ("1.5m", 90), ("30S", 30), ("2min", 120)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, "--retention") == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("30 GiB", 30 << 30), ("64MiB", 64 << 20), ("1.5TB", 1.5e12), ("10 kb", 10_000), ("7B", 7)]
)
def test_sizes(text: str, size: float) -> None:
    assert parse_bytes(text, "--disk") == size


@pytest.mark.parametrize("text", ["", "1", "h", "1 week", "-1h", "0h", "1h30m", "1e3s", "nan s", "1,5h"])
def test_what_is_no_duration_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--retention: '.*'; accepted: a time above 0 with its unit, as 500ms"):
        parse_duration(text, "--retention")


@pytest.mark.parametrize("text", ["30", "GiB", "30 Gi", "0 MiB", "-1 MiB"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--disk: '.*'; accepted: a size above 0 with its unit"):
        parse_bytes(text, "--disk")


def test_numbers_as_people_read_them() -> None:
    assert [shown_bytes(size) for size in (7, 2048, 30 << 30)] == ["7 B", "2 KiB", "30 GiB"]
    assert [shown_duration(time) for time in (0.02, 1.5, 90, 7200, 7 * 86_400)] == [
        "20 ms",
        "1.5 s",
        "90 s",
        "2 h",
        "7 d",
    ]
