"""Times that a person gives: a moment, or how long ago."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from undercurrent.errors import ConfigError

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LAST_S = 253_402_300_799.0


def parse_time(text: str, option: str = "time") -> int:
    """Return a time as milliseconds since the Unix epoch.

    Args:
        text: ISO 8601 (UTC where it names no zone), seconds since the Unix epoch, or `30m`, `6h`, `2d` for so long ago.
        option: that it was given with, for the error.

    Raises:
        ConfigError: it is none of them.
    """
    try:
        ago = _AGO.fullmatch(text)
        seconds = time.time() - float(ago[1]) * _SECONDS[ago[2]] if ago else _moment(text)
    except ValueError as exc:
        raise ConfigError(
            f"{option} {text!r}: expected ISO 8601, seconds since the Unix epoch, or 30m, 6h, 2d"
        ) from exc
    if not 0 <= seconds <= _LAST_S:
        raise ConfigError(f"{option} {text!r}: expected one from 1970 to 9999")
    return int(seconds * 1000)


def _moment(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
