"""A tensor-parallel rank beside the one that publishes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig

from undercurrent.adapters.vllm import compat
from undercurrent.adapters.vllm.checked_taps import CheckedTaps
from undercurrent.adapters.vllm.settings import CaptureSettings
from undercurrent.capture.points import tap_groups
from undercurrent.spec import ExtractionPoint


class SilentRank:
    """Takes part in the checks at start, which compare the ranks; then it captures nothing and opens no ring.

    Args:
        settings: from the driver.
        config: of the engine.
        runner: the model runner, its model loaded.
        rank: which worker this is.

    Raises:
        CaptureError: a point cannot be captured on this model.
    """

    def __init__(self, settings: CaptureSettings, config: VllmConfig, runner: compat.Runner, rank: compat.Rank) -> None:
        points = compat.capture_points(config, settings.points, rank.pipeline)
        self.taps = CheckedTaps(runner, config, tap_groups(points), settings.max_tap_bytes)
        self.report: dict[str, Any] = {}
        self._everything = settings.open_points

    def start(self) -> None:
        """Check the taps on the running model with the other ranks, and take them off.

        Raises:
            CaptureError: the self-check failed.
        """
        self.taps.when_warm(everything=self._everything)
        self.taps.drop()

    def set_points(self, points: Sequence[ExtractionPoint]) -> None:
        """Leave it to the rank that publishes."""

    def on_weights(self, how: str) -> None:
        """Leave it to the rank that publishes."""
