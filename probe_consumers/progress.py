"""How far one probe has come on a stream, apart from what the probe itself keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from undercurrent.core import ProbeAction, ProbeSignal


class Owed(NamedTuple):
    """An error that is said later than it was found.

    Args:
        said_from: offset from which on it is said.
        error: in words.
    """

    said_from: int
    error: str


@dataclass(slots=True)
class Progress:
    """How far one probe has come.

    Args:
        started: it was told of the stream.
        failed: it has ended, and says nothing more.
        owed: what is still to be said of that.
        scored: (token, layer) pairs that it gave a score.
        clear_up_to: the stream's clear mark as of its last block.
        said_clear_up_to: the same as a verdict told it last.
        strongest: its strongest signal.
    """

    started: bool = False
    failed: bool = False
    owed: Owed | None = None
    scored: int = 0
    clear_up_to: int = -1
    said_clear_up_to: int = -1
    strongest: ProbeSignal | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        signal = self.strongest
        return {
            "started": self.started,
            "failed": self.failed,
            "owed": self.owed,
            "scored": self.scored,
            "clear_up_to": self.clear_up_to,
            "said_clear_up_to": self.said_clear_up_to,
            "strongest": signal and [signal.action.value, signal.token_pos, signal.layer],
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Progress:
        """Return what `to_plain` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        strongest = None
        if data["strongest"] is not None:
            action, token_pos, layer = data["strongest"]
            strongest = ProbeSignal(ProbeAction(action), token_pos=token_pos, layer=layer)
        return cls(
            started=bool(data["started"]),
            failed=bool(data["failed"]),
            owed=None if data["owed"] is None else Owed(*data["owed"]),
            scored=int(data["scored"]),
            clear_up_to=int(data["clear_up_to"]),
            said_clear_up_to=int(data["said_clear_up_to"]),
            strongest=strongest,
        )
