"""What the engine worker and its publisher count; the probe host's are in `probe_consumers.metrics`.

Base units, prefix `undercurrent_`, a registry of one's own. Labels are bounded: extraction points and partitions come
from the configuration, everything else from the words listed here; another word counts as `other`. Never a request id,
a prompt or a token.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

OTHER = "other"

PAUSE_REASONS = ("backlog", "reading_back", "proving", "partition_counts", "leaving")
DROP_REASONS = ("ring_full", "stale_tap", "cached", "too_large", "unconfirmed")
FAULT_KINDS = ("bad_order", "capture_error", "orphaned")
OUTCOMES = ("completed", "aborted", "failed")
ABORT_STAGES = ("published", "decided", "received", "applied")
ACK_OUTCOMES = ("applied", "already", "too_late", "stale", "unknown")
LETTER_CAUSES = ("undecodable", "bad_key", "bad_partition", "bad_request", "poison", "too_large")

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def bounded(word: str, known: Iterable[str]) -> str:
    """Return `word` if it is a known label value, else `other`."""
    return word if word in known else OTHER


class _Families:
    """Makes metric families with the prefix in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"undercurrent_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"undercurrent_{name}", text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"undercurrent_{name}", text, labels, registry=self._registry, buckets=buckets)


class EngineMetrics:
    """Metrics of an engine worker.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Families(registry)
        self.running = make.gauge("engine_requests_running", "Requests in the engine.")
        self.waiting = make.gauge("engine_requests_waiting", "Prompts fetched and not in the engine.")
        self.requests = make.counter("engine_requests_total", "Requests that got their final.", "outcome")
        self.request_seconds = make.histogram(
            "engine_request_seconds", "From Accepted to the final.", "outcome", buckets=_LONG_SECONDS
        )
        self.tokens = make.counter("engine_tokens_total", "Tokens generated.")
        self.paused = make.gauge("engine_intake_paused", "1 while no prompt is taken, by reason.", "reason")
        self.duplicates = make.counter("engine_duplicates_total", "Prompts that name an id seen before.", "kind")
        self.prompt_lag = make.gauge(
            "engine_prompt_lag_records", "Prompts between the lowest unfinished one and the log's end.", "partition"
        )
        self.prompt_lag_seconds = make.gauge(
            "engine_prompt_lag_seconds", "Age of the lowest unfinished prompt.", "partition"
        )
        self.abort_seconds = make.histogram(
            "engine_abort_seconds", "From the token's capture to each stage of its abort.", "stage"
        )
        self.acks = make.counter("engine_abort_acks_total", "Acknowledged commands.", "outcome")
        self.letters = make.counter("engine_dead_letters_total", "Prompts written to the dead-letter topic.", "cause")
        self.epochs = make.counter("engine_partitions_taken_total", "Partitions taken over, their epoch committed.")
        self.lost = make.counter("engine_partitions_lost_total", "Partitions lost without being asked.")
        self.commit_failures = make.counter("engine_commit_failures_total", "Commits that the broker refused.")
        for reason in PAUSE_REASONS:
            self.paused.labels(reason).set(0)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)

    def finished(self, outcome: str, seconds: float) -> None:
        """Count a request's final and the time since its Accepted, in seconds."""
        word = bounded(outcome, OUTCOMES)
        self.requests.labels(word).inc()
        self.request_seconds.labels(word).observe(seconds)

    def pause(self, reason: str, *, on: bool) -> None:
        """Say whether intake is paused for a reason of `PAUSE_REASONS`."""
        self.paused.labels(bounded(reason, PAUSE_REASONS)).set(int(on))

    def abort_stage(self, stage: str, seconds: float) -> None:
        """Count the time from a token's capture to a stage of `ABORT_STAGES`, in seconds."""
        self.abort_seconds.labels(bounded(stage, ABORT_STAGES)).observe(seconds)

    def ack(self, outcome: str) -> None:
        """Count an acknowledged command by an outcome of `ACK_OUTCOMES`."""
        self.acks.labels(bounded(outcome, ACK_OUTCOMES)).inc()

    def dead_letter(self, cause: str) -> None:
        """Count a dead letter by a cause of `LETTER_CAUSES`."""
        self.letters.labels(bounded(cause, LETTER_CAUSES)).inc()


class PublisherMetrics:
    """Metrics of the process that publishes activations.

    Args:
        registry: where they are registered.
        points: names of the extraction points.
    """

    def __init__(self, registry: CollectorRegistry, points: Iterable[str] = ()) -> None:
        make = _Families(registry)
        self.records = make.counter("publisher_records_total", "Activation records acknowledged.", "point")
        self.record_bytes = make.counter("publisher_record_bytes_total", "Bytes of acknowledged records.", "point")
        self.drops = make.counter(
            "publisher_dropped_activations_total", "(token, layer) pairs dropped and declared.", "point", "reason"
        )
        self.open_streams = make.gauge("publisher_open_streams", "Streams started and not ended.", "point")
        self.ring_used = make.gauge("publisher_ring_used_bytes", "Bytes of the ring that wait to be read.")
        self.ring_limit = make.gauge("publisher_ring_limit_bytes", "Size of the ring.")
        self.buffer_used = make.gauge("publisher_buffer_used_bytes", "Bytes that wait for an acknowledgement.")
        self.buffer_limit = make.gauge("publisher_buffer_limit_bytes", "Most bytes that may wait.")
        self.held_bytes = make.gauge("publisher_held_bytes", "Bytes of rows whose tokens nobody has seen yet.")
        self.past_end = make.counter("publisher_rows_past_end_total", "Rows computed past the end of their request.")
        self.ack_seconds = make.histogram("publisher_ack_seconds", "From produce to the acknowledgement.")
        self.publish_seconds = make.histogram("publisher_publish_seconds", "From capture to the acknowledgement.")
        self.errors = make.counter("publisher_delivery_errors_total", "Records that the broker did not take.", "point")
        self.faults = make.counter("publisher_capture_faults_total", "Capture errors without a stream.", "kind")
        for point in points:
            self.records.labels(point)
            self.open_streams.labels(point).set(0)
            self.errors.labels(point)

    def dropped(self, point: str, reason: str, activations: int) -> None:
        """Count dropped (token, layer) pairs by a reason of `DROP_REASONS`."""
        self.drops.labels(point, bounded(reason, DROP_REASONS)).inc(activations)

    def fault(self, kind: str, count: int) -> None:
        """Count capture errors without a stream by a kind of `FAULT_KINDS`."""
        self.faults.labels(bounded(kind, FAULT_KINDS)).inc(count)
