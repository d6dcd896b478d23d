"""What a publisher's reports add to its metrics."""

from __future__ import annotations

import logging
from typing import Any

from undercurrent.service.metrics import PublisherMetrics

logger = logging.getLogger(__name__)

_LONG_WAIT_S = 5.0


def count_report(metrics: PublisherMetrics, report: dict[str, Any]) -> None:
    """Count what a publisher says of the time since its last report.

    Args:
        metrics: of the publisher.
        report: the fields of `publisher.Report`.
    """
    for point, counts in report["counts"].items():
        metrics.records.labels(point).inc(counts["records"])
        metrics.record_bytes.labels(point).inc(counts["record_bytes"])
        metrics.open_streams.labels(point).set(counts["open_streams"])
        for reason, activations in counts["dropped"].items():
            metrics.dropped(point, reason, activations)
    for seconds in report["ack_s"]:
        metrics.ack_seconds.observe(seconds)
    for seconds in report["publish_s"]:
        metrics.publish_seconds.observe(seconds)
    for point, count in report["refused"].items():
        metrics.errors.labels(point).inc(count)
    for point, count in report["unknown"].items():
        metrics.unknown.labels(point).inc(count)
    metrics.renewals.labels("producer").inc(report["renewed"])
    metrics.buffer_used.set(report["waiting_bytes"])
    metrics.held_bytes.set(report["held_bytes"])
    metrics.past_end.inc(report["past_end"])
    for kind, count in report["faults"].items():
        metrics.fault(kind, count)
        logger.warning("%d capture faults: %s", count, kind)
    if report["waiting_s"] > _LONG_WAIT_S:
        logger.warning("the publisher has waited %.0f s for the broker", report["waiting_s"])
