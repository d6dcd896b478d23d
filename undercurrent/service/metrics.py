"""What the engine worker and its publisher count; the probe host's are in `probe_consumers.metrics`.

Base units, prefix `undercurrent_`, a registry of one's own. Labels are bounded: extraction points and partitions come
from the configuration, everything else from the words listed here; another word counts as `other`. Never a request id,
a prompt or a token.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

OTHER = "other"

PAUSE_REASONS = ("backlog", "reading_back", "proving", "partition_counts", "leaving", "unguarded")
DROP_REASONS = (
    "ring_full",
    "stale_tap",
    "overrun",
    "cached",
    "too_large",
    "unconfirmed",
    "queue_depth",
    "buffer_full",
    "refused",
    "cut_off",
)
FAULT_KINDS = ("bad_order", "capture_error", "orphaned")
RENEWALS = ("producer", "process")
OUTCOMES = ("completed", "aborted", "failed")
ABORT_STAGES = ("published", "decided", "received", "applied")
OPERATOR_STAGES = ("received", "applied")
ACK_OUTCOMES = ("applied", "already", "too_late", "stale", "braked", "held_out", "unknown")
GUARD_GAPS = ("absent", "behind", "error", "incomplete")
"""What keeps a guard from being complete, worst first."""
RESTART_CAUSES = ("released", "lost")
_MOST_BRAKED = 64
LETTER_CAUSES = (
    "undecodable",
    "bad_key",
    "bad_partition",
    "bad_request",
    "engine_lost",
    "out_of_range",
    "poison",
    "too_large",
)

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
        points: names of the extraction points.
    """

    def __init__(self, registry: CollectorRegistry, points: Iterable[str] = ()) -> None:
        make = _Families(registry)
        self.running = make.gauge("engine_requests_running", "Requests in the engine.")
        self.alone = make.gauge(
            "engine_running_alone", "1 while a prompt that ended other engines runs, with nothing beside it."
        )
        self.waiting = make.gauge("engine_requests_waiting", "Prompts fetched and not in the engine.")
        self.held = make.gauge("engine_requests_held", "Of them, those that wait until a point of theirs is guarded.")
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
        self.operator_seconds = make.histogram(
            "engine_operator_abort_seconds", "From an operator's command to each stage of its abort.", "stage"
        )
        self.acks = make.counter("engine_abort_acks_total", "Acknowledged commands.", "outcome")
        self.braked = make.gauge(
            "engine_probe_braked", "1 while the aborts of a probe that stops too many requests are ignored.", "probe"
        )
        self._braked_names: set[str] = set()
        self.point_unguarded = make.gauge(
            "engine_point_unguarded", "1 while a guard of the point is absent or too far behind.", "point"
        )
        self.requests_unguarded = make.counter(
            "requests_unguarded_total", "Requests that completed though a guard had not seen all of them.", "state"
        )
        self.letters = make.counter("engine_dead_letters_total", "Prompts written to the dead-letter topic.", "cause")
        self.restarts = make.counter(
            "engine_restarts_total",
            "Requests begun anew: after a worker that gave them up (released), or one that said nothing more (lost).",
            "cause",
        )
        self.epochs = make.counter("engine_partitions_taken_total", "Partitions taken over, their epoch committed.")
        self.lost = make.counter("engine_partitions_lost_total", "Partitions lost without being asked.")
        self.commit_failures = make.counter("engine_commit_failures_total", "Commits that the broker refused.")
        for reason in PAUSE_REASONS:
            self.paused.labels(reason).set(0)
        for cause in RESTART_CAUSES:
            self.restarts.labels(cause)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        for point in points:
            self.point_unguarded.labels(point).set(0)
        for state in GUARD_GAPS:
            self.requests_unguarded.labels(state)

    def finished(self, outcome: str, seconds: float) -> None:
        """Count a request's final and the time since its Accepted, in seconds."""
        word = bounded(outcome, OUTCOMES)
        self.requests.labels(word).inc()
        self.request_seconds.labels(word).observe(seconds)

    def unguarded(self, states: Iterable[str]) -> None:
        """Count a completed request by the worst of its guards' states, where one is not complete."""
        found = set(states)
        worst = next((state for state in GUARD_GAPS if state in found), None)
        if worst is not None:
            self.requests_unguarded.labels(worst).inc()

    def pause(self, reason: str, *, on: bool) -> None:
        """Say whether intake is paused for a reason of `PAUSE_REASONS`."""
        self.paused.labels(bounded(reason, PAUSE_REASONS)).set(int(on))

    def abort_stage(self, stage: str, seconds: float) -> None:
        """Count the time from a token's capture to a stage of `ABORT_STAGES`, in seconds."""
        self.abort_seconds.labels(bounded(stage, ABORT_STAGES)).observe(seconds)

    def operator_stage(self, stage: str, seconds: float) -> None:
        """Count the time from an operator's command to a stage of `OPERATOR_STAGES`, in seconds."""
        if stage in OPERATOR_STAGES:
            self.operator_seconds.labels(stage).observe(seconds)

    def ack(self, outcome: str) -> None:
        """Count an acknowledged command by an outcome of `ACK_OUTCOMES`."""
        self.acks.labels(bounded(outcome, ACK_OUTCOMES)).inc()

    def brake(self, probe: str, *, on: bool) -> None:
        """Say whether a probe is braked. The name comes from commands: past a number of them it counts as `other`."""
        if len(self._braked_names) < _MOST_BRAKED:
            self._braked_names.add(probe)
        self.braked.labels(bounded(probe, self._braked_names)).set(int(on))

    def restarted(self, cause: str) -> None:
        """Count a request that is begun anew, by a cause of `RESTART_CAUSES`."""
        self.restarts.labels(bounded(cause, RESTART_CAUSES)).inc()

    def dead_letter(self, cause: str) -> None:
        """Count a dead letter by a cause of `LETTER_CAUSES`."""
        self.letters.labels(bounded(cause, LETTER_CAUSES)).inc()


class LetterMetrics:
    """Metrics of whoever looks for records that nobody can read: an engine worker, or the publisher of a bare server.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.unreadable = _Families(registry).counter(
            "engine_unreadable_records_total",
            "Records of other topics than prompts that nobody can read, written to their dead-letter topics.",
            "topic",
        )


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
        self.unknown = make.counter(
            "publisher_unknown_records_total", "Records in flight when a producer broke: nobody knows.", "point"
        )
        self.renewals = make.counter(
            "publisher_renewals_total", "Publishers that took the place of one that broke or died.", "kind"
        )
        self.faults = make.counter("publisher_capture_faults_total", "Capture errors without a stream.", "kind")
        for point in points:
            self.records.labels(point)
            self.open_streams.labels(point).set(0)
            self.errors.labels(point)
            self.unknown.labels(point)
        for kind in RENEWALS:
            self.renewals.labels(kind)

    def dropped(self, point: str, reason: str, activations: int) -> None:
        """Count dropped (token, layer) pairs by a reason of `DROP_REASONS`."""
        self.drops.labels(point, bounded(reason, DROP_REASONS)).inc(activations)

    def fault(self, kind: str, count: int) -> None:
        """Count capture errors without a stream by a kind of `FAULT_KINDS`."""
        self.faults.labels(bounded(kind, FAULT_KINDS)).inc(count)
