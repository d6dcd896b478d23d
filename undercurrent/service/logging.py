"""Logs of the services: one line per event on stderr, as text or as JSON, never a prompt, a token or a tensor.

Values go in by `extra=`, by name: `logger.info("partition assigned", extra={"partition": 3})`. Whatever could carry
what a user wrote or a model computed (bytes, arrays, sequences, mappings, long text) is replaced by a word on its kind
and size, wherever it stands in a record; so a careless line leaks a length, not a prompt.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sized
from enum import StrEnum
from typing import Any, TextIO

# Longest text that is taken for a word of ours (names, ids, paths, addresses).
_MOST_CHARACTERS = 300
_MOST_LINE_CHARACTERS = 4000

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogFormat(StrEnum):
    """How a log line looks."""

    JSON = "json"
    TEXT = "text"


def setup_logging(
    log_format: LogFormat | str = LogFormat.TEXT,
    level: str = "INFO",
    *,
    service: str = "",
    stream: TextIO | None = None,
) -> None:
    """Send all log records to stderr in one format; replaces what was set up before.

    Args:
        log_format: `json` or `text`.
        level: name of the least level that is shown.
        service: named in every JSON line.
        stream: instead of stderr.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.addFilter(scrub)
    handler.setFormatter(JsonFormatter(service) if LogFormat(log_format) is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    for earlier in root.handlers[:]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(level.upper())


def scrub(record: logging.LogRecord) -> bool:
    """Replace what may be a user's or a model's in a record's arguments and extras; always lets the record pass."""
    if isinstance(record.args, Mapping):
        record.args = {key: _scrubbed(value) for key, value in record.args.items()}
    elif record.args:
        record.args = tuple(_scrubbed(value) for value in record.args)
    for key, value in vars(record).items():
        if key not in _OWN:
            setattr(record, key, _scrubbed(value))
    return True


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ts (UTC), level, logger, service, message, extras, and error with its trace.

    Args:
        service: name of the service, left out when empty.
    """

    def __init__(self, service: str = "") -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "ts": _utc(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        if self._service:
            line["service"] = self._service
        line.update(_extras(record))
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`time level logger: message key=value`, for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, the trace below it."""
        extras = "".join(f" {key}={value}" for key, value in _extras(record).items())
        line = f"{_utc(record.created)} {record.levelname:<7} {record.name}: {_cut(record.getMessage())}{extras}"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}


def _scrubbed(value: Any) -> Any:  # noqa: ANN401 - a log record carries anything
    if value is None or isinstance(value, bool | int | float | BaseException):
        return value
    if isinstance(value, str):
        return value if len(value) <= _MOST_CHARACTERS else f"<text of {len(value)} characters>"
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"<{type(value).__name__} of shape {tuple(shape)}>"
    if isinstance(value, tuple) and type(value).__str__ is not object.__str__:
        return _scrubbed(str(value))  # a name, such as that of a partition: it says itself what is shown of it
    if isinstance(value, bytes | bytearray | memoryview | Mapping | list | tuple | set | frozenset):
        return f"<{type(value).__name__} of {len(value)}>"
    text = str(value)
    if isinstance(value, Sized) or len(text) > _MOST_CHARACTERS:
        return text if len(text) <= _MOST_CHARACTERS else f"<{type(value).__name__}>"
    return text


def _cut(message: str) -> str:
    return message if len(message) <= _MOST_LINE_CHARACTERS else message[:_MOST_LINE_CHARACTERS] + "..."


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
