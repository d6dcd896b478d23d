"""For how long a member has held what it cannot use alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from probe_consumers.inputs import Inputs

logger = logging.getLogger(__name__)

TORN_AFTER_S = 30.0
"""A group whose members change gives partitions of one number at different times; after so long it means it."""


class Halves:
    """Partition numbers of which a member has some lanes only: it can read none of them.

    Args:
        inputs: what is read.
        monotonic: seconds.
    """

    def __init__(self, inputs: Inputs, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._inputs = inputs
        self._monotonic = monotonic
        self._since_s: dict[int, float] = {}
        self._told = False
        self.trouble = ""

    def look(self, assigned: AbstractSet[int]) -> None:
        """Take note of the lanes that are this member's now."""
        now_s = self._monotonic()
        self._since_s = {number: self._since_s.get(number, now_s) for number in self._inputs.torn(assigned)}
        lasting = [number for number, since_s in self._since_s.items() if now_s - since_s > TORN_AFTER_S]
        self.trouble = self._text(lasting) if lasting else ""
        if lasting and not self._told:
            logger.error("%s", self.trouble)
        self._told = bool(lasting)

    def _text(self, numbers: Sequence[int]) -> str:
        return (
            f"partitions {', '.join(map(str, numbers))} of only some of {', '.join(self._inputs.topics)} have been "
            f"assigned for {TORN_AFTER_S:g} s, and are not read: joining probes need service.assignor: range on every "
            "member of the group (or the consumer protocol with the server's range assignor)"
        )
