"""An open stream as plain data and back: what a reader that does not see its beginning has to know of it."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from undercurrent.errors import ProtocolError
from undercurrent.protocol.messages import ActivationBlock, EndReason, StreamEnded, StreamStarted
from undercurrent.protocol.open_stream import Shard, Stream, StreamId

MAX_HELD_BYTES = 128 * 1024
"""Rows of shards that are ahead, beyond which a stream is not written down: a moment later fewer wait."""

MAX_STREAM_CHARS = 256 * 1024
"""Beyond it a stream is not written down: it must fit, beside its probes, a topic with the broker's default limit."""

T = TypeVar("T", StreamStarted, StreamEnded, ActivationBlock)
_SHARD = ("next_seq", "missing", "revision", "last_pos", "clear_up_to")
_OWN = ("shown_up_to", "clear_up_to", "revision", "conflict", "rewound")


def write_stream(stream: Stream) -> str | None:
    """Return an open stream as JSON; None while it holds too many rows that wait for another shard, or is too long."""
    join = stream.write_join(MAX_HELD_BYTES, _plain)
    if stream.joins and join is None:
        return None
    shards = {
        str(number): {
            **{name: getattr(shard, name) for name in _SHARD},
            "started": None if shard.started is None else _plain(shard.started),
            "ended": None if shard.ended is None else _plain(shard.ended),
        }
        for number, shard in stream.shards.items()
    }
    data = {
        **{name: getattr(stream, name) for name in _OWN},
        "started": _plain(stream.started),
        "shards": shards,
        "voids": {str(revision): position for revision, position in stream.voids.items()},
        "join": join,
    }
    text = json.dumps(data, separators=(",", ":"))
    return text if len(text) <= MAX_STREAM_CHARS else None


def rollouts_of(text: str) -> int:
    """Return the `rollouts` of the StreamStarted in what `write_stream` wrote; 0 where it is something else."""
    try:
        return int(json.loads(text)["started"]["rollouts"])
    except (ValueError, KeyError, TypeError):
        return 0


def read_stream(text: str, start_offset: int) -> Stream:
    """Return the stream that `write_stream` wrote.

    Args:
        text: what it wrote.
        start_offset: of the record that opened the stream.

    Raises:
        ProtocolError: it is nothing that `write_stream` writes.
    """
    try:
        data = json.loads(text)
        started = _message(StreamStarted, data["started"])
        stream = Stream(StreamId(started.request_id, started.attempt, started.index), started, start_offset)
        for name in _OWN:
            setattr(stream, name, type(getattr(stream, name))(data[name]))
        for number, fields in data["shards"].items():
            stream.shards[int(number)] = _shard(fields)
        stream.voids.update({int(revision): int(position) for revision, position in data["voids"].items()})
        stream.read_join(data["join"], lambda fields: _message(ActivationBlock, fields))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ProtocolError(f"the state of a stream cannot be read: {exc!r}") from exc
    return stream


def _shard(fields: Mapping[str, Any]) -> Shard:
    shard = Shard()
    for name in _SHARD:
        setattr(shard, name, int(fields[name]))
    if fields["started"] is not None:
        shard.started = _message(StreamStarted, fields["started"])
    if fields["ended"] is not None:
        shard.ended = _message(StreamEnded, fields["ended"])
    return shard


def _plain(message: StreamStarted | StreamEnded | ActivationBlock) -> dict[str, Any]:
    return {item.name: _value(getattr(message, item.name)) for item in dataclasses.fields(message)}


def _value(value: Any) -> Any:  # noqa: ANN401 - any field's value
    if isinstance(value, bytes | memoryview):  # the values of a block are a view on its record
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, StrEnum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def _message(cls: type[T], fields: Mapping[str, Any]) -> T:
    # What a newer version has added is not known here, and what it has not written has a default.
    known = {item.name for item in dataclasses.fields(cls)}
    found = {name: _back(value) for name, value in fields.items() if name in known}
    if "reason" in found:
        found["reason"] = EndReason(found["reason"])
    return cls(**found)


def _back(value: Any) -> Any:  # noqa: ANN401 - any field's value
    if isinstance(value, Mapping):
        return base64.b64decode(value["base64"])
    return tuple(value) if isinstance(value, list) else value
