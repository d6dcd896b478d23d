"""What a binding counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Figures of one (request, point) at one moment.

    Args:
        queue_depth: records that wait for the probe; 0 where it runs inside `route`.
        drop_count: records that the probe never saw because its queue was full or the request ended.
        activation_count: records that the probe saw, those included at which it raised.
        error_count: records at which it raised or gave something that is no signal.
        avg_activation_latency_seconds: mean time in `on_activation`; 0.0 before the first record.
        fallback_count: times that a fallback stood in for an answer that was awaited.
    """

    queue_depth: int
    drop_count: int
    activation_count: int
    error_count: int
    avg_activation_latency_seconds: float
    fallback_count: int = 0


class Metrics:
    """The running counts. Drops and fallbacks are counted under the binding's lock, the rest by whoever runs it."""

    __slots__ = ("activation_count", "busy_s", "drop_count", "error_count", "fallback_count")

    def __init__(self) -> None:
        self.activation_count = 0
        self.error_count = 0
        self.drop_count = 0
        self.fallback_count = 0
        self.busy_s = 0.0

    def snapshot(self, queue_depth: int) -> MetricsSnapshot:
        """Return the figures of now."""
        count = self.activation_count
        return MetricsSnapshot(
            queue_depth=queue_depth,
            drop_count=self.drop_count,
            activation_count=count,
            error_count=self.error_count,
            avg_activation_latency_seconds=self.busy_s / count if count else 0.0,
            fallback_count=self.fallback_count,
        )
