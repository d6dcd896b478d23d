"""Durations and sizes as people write them."""

from __future__ import annotations

import re

from undercurrent.errors import ConfigError

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def parse_duration(text: str, name: str) -> float:
    """Return a time in seconds.

    Args:
        text: as 500ms, 30s, 15m, 1h, 7d.
        name: of the option, for errors.

    Raises:
        ConfigError: it is something else, or 0.
    """
    return _parsed(text, name, _SECONDS, "a time above 0 with its unit, as 500ms, 30s, 15m, 1h or 7d")


def parse_bytes(text: str, name: str) -> int:
    """Return a size in bytes.

    Args:
        text: as 64MiB, 30 GiB, 1.5TB.
        name: of the option, for errors.

    Raises:
        ConfigError: it is something else, or 0.
    """
    return round(_parsed(text, name, _BYTES, "a size above 0 with its unit, as 64MiB, 30 GiB or 1.5TB"))


def _parsed(text: str, name: str, units: dict[str, float] | dict[str, int], accepted: str) -> float:
    found = _NUMBER.fullmatch(text)
    by_lower = {unit.lower(): size for unit, size in units.items()}
    size = by_lower.get(found[2].lower()) if found else None
    if found is None or size is None or float(found[1]) == 0:
        raise ConfigError(f"{name}: {text!r:.40}; accepted: {accepted}")
    return float(found[1]) * size


def shown_bytes(size: float) -> str:
    """Return a size with a unit that a reader can use."""
    for unit, least in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= least:
            return f"{size / least:,.3g} {unit}" if size < 1000 * least else f"{size / least:,.0f} {unit}"
    return f"{size:,.0f} B"


def shown_duration(seconds: float) -> str:
    """Return a time with a unit that a reader can use."""
    for unit, least in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * least or (unit == "s" and seconds >= 1):
            return f"{seconds / least:,.3g} {unit}"
    return f"{1000 * seconds:,.3g} ms"
