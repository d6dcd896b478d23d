"""The holdout: a random share of the requests that runs to its end whatever a probe asks for.

What a probe's aborts cost and save can only be told from requests that they did not end. Whether a request is one of
them follows from its id, so that all attempts and children of it are on the same side, and a larger share holds the
requests of a smaller one and more. Each final says it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from undercurrent.protocol.messages import CommandSource, ControlCommand, Holdout


def in_holdout(request_id: str, holdout_share: float, salt: str = "") -> bool:
    """Return whether a request runs to its end whatever a probe says: a pure function of its id."""
    digest = hashlib.sha256(f"holdout\0{salt}\0{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < holdout_share * 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldoutRule:
    """Which requests are held out.

    Args:
        share: of the requests; 0 for none.
        salt: goes into the hash. Whoever chooses the ids of requests and knows it can choose one that no probe stops.
    """

    share: float = 0.0
    salt: str = field(default="", repr=False)

    def of(self, request_id: str) -> Holdout | None:
        """Return what a request's final says of it, None where no request is held out."""
        return Holdout(share=self.share, held=self.holds(request_id)) if self.share else None

    def holds(self, request_id: str) -> bool:
        """Return whether a request is held out."""
        return self.share > 0 and in_holdout(request_id, self.share, self.salt)

    def ignores(self, command: ControlCommand) -> bool:
        """Return whether a command is recorded and not applied; an operator's always is."""
        return command.source is CommandSource.PROBE and self.holds(command.request_id)
