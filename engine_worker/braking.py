"""What is said of the brake: once when it is put on a probe, and once when it is lifted."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BrakeTeller:
    """See the module.

    Args:
        told: hears the same, as a probe and whether it is braked.
    """

    def __init__(self, told: Callable[[str, bool], None] = lambda _probe, _on: None) -> None:
        self._told = told
        self._braked: frozenset[str] = frozenset()

    def see(self, braked: frozenset[str]) -> None:
        """Take the probes that are not listened to now."""
        for probe in sorted(braked - self._braked):
            logger.error(
                "probe %s is braked: it stops too many requests. Its aborts are ignored until `undercurrent probe "
                "resume %s`; an operator's are not",
                probe,
                probe,
            )
            self._told(probe, True)
        for probe in sorted(self._braked - braked):
            logger.warning("probe %s is listened to again", probe)
            self._told(probe, False)
        self._braked = braked
