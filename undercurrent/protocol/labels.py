"""The key of a label: one source says one thing about a request under one name, and the last word counts."""

from __future__ import annotations

from undercurrent.errors import ProtocolError

_SEPARATOR = "|"


def label_key(request_id: str, name: str, source: str) -> str:
    """Return a label's key on its topic; name and source have no `|`."""
    return _SEPARATOR.join((request_id, name, source))


def label_key_parts(key: bytes) -> tuple[str, str, str]:
    """Return request id, name and source of a key.

    Raises:
        ProtocolError: it is no key of a label.
    """
    parts = key.decode(errors="replace").rsplit(_SEPARATOR, 2)
    if len(parts) != 3:
        raise ProtocolError(f"key {key!r}: no label's; expected request_id|name|source")
    return parts[0], parts[1], parts[2]
