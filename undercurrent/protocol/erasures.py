"""Which requests are erased, as the erasures topic says it: by hash, so that the mark does not say what it removed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from undercurrent.errors import ProtocolError, ReplayError
from undercurrent.protocol.labels import label_key_parts


def digest(request_id: str) -> str:
    """Return how the topic names a request: the SHA-256 of its id, hex."""
    return hashlib.sha256(request_id.encode()).hexdigest()


class Erasures:
    """The requests that nothing may export or replay.

    Args:
        digests: of their ids.
    """

    def __init__(self, digests: Iterable[str] = ()) -> None:
        self._digests = set(digests)

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, request_id: object) -> bool:
        return bool(self._digests) and isinstance(request_id, str) and digest(request_id) in self._digests

    def add(self, key: bytes | None, value: bytes | None) -> None:
        """Take a record of the topic. Its key says all that counts; one without a value takes the mark back."""
        if key is None:
            return
        name = key.decode(errors="replace")
        if value:
            self._digests.add(name)
        else:
            self._digests.discard(name)

    def covers(self, key: bytes | None) -> bool:
        """Return whether a record's key is the id of an erased request."""
        return bool(self._digests) and bool(key) and hashlib.sha256(key or b"").hexdigest() in self._digests

    def covers_label(self, key: bytes | None) -> bool:
        """Return whether a label's key is one of an erased request."""
        try:
            return bool(self._digests) and key is not None and label_key_parts(key)[0] in self
        except ProtocolError:
            return False

    def refuse(self, request_ids: Iterable[str]) -> None:
        """Refuse requests that were asked for by name, if one is erased.

        Raises:
            ReplayError: naming those that are.
        """
        if erased := sorted(request_id for request_id in set(request_ids) if request_id in self):
            raise ReplayError(f"erased, and neither shown, exported nor replayed again: {', '.join(erased)}")
