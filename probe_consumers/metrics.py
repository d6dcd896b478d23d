"""What a probe host counts. Labels are bounded: points, bindings, partitions and fixed words, never a request."""

from __future__ import annotations

import math
from collections import Counter as Counts
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from probe_consumers.drift import DriftWatch, Key, Seen
from undercurrent.kafka.records import Record
from undercurrent.protocol.host_events import Transaction
from undercurrent.protocol.messages import ControlCommand, VerdictKind

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ProbeMetrics:
    """The metric families of a process.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
            return Counter(f"undercurrent_{name}", text, ("point", *labels), registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"undercurrent_{name}", text, ("point", *labels), registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"undercurrent_{name}", text, ("point",), registry=registry, buckets=_SECONDS)

        self.records = counter("probe_records_total", "Records whose outputs this host derived, by message.", ("kind",))
        self.received = counter("probe_received_records_total", "Records read, also those read again.", ())
        self.received_bytes = counter("probe_received_bytes_total", "Bytes of the values read.", ())
        self.strays = counter("probe_stray_records_total", "Records that no open stream takes.", ("cause",))
        self.verdicts = counter("verdicts_total", "Verdicts committed.", ("probe", "kind"))
        self.errors = counter("probe_errors_total", "Streams for which a probe failed.", ("probe",))
        self.aborts = counter("probe_aborts_total", "Abort commands sent, also those sent again.", ("probe",))
        self.late_aborts = counter("probe_aborts_too_old_total", "Aborts not sent: their record is too old.", ())
        self.abort_decision = histogram("probe_abort_decision_seconds", "From capture to the decision to abort.")
        self.letters = counter("dead_letters_total", "Dead letters committed.", ("cause",))
        self.transactions = counter("probe_transactions_total", "Transactions.", ("outcome",))
        self.transaction_seconds = histogram("probe_transaction_seconds", "Time of one transaction.")
        self.batch_seconds = histogram("probe_batch_seconds", "Time to decode and judge what one poll gave.")
        self.notices = counter("probe_position_notices_total", "What was declared about positions.", ("notice",))
        self.problems = counter("probe_partition_problems_total", "Partitions that could not be read.", ("problem",))
        self.drift = gauge("probe_drift", "Drift of the last window of requests.", ("probe", "version", "figure"))
        self.drift_limits = gauge(
            "probe_drift_limit", "Beyond this a figure is raised.", ("probe", "version", "figure")
        )
        self.drift_raised = gauge("probe_drift_raised", "Figures beyond their limits.", ("probe", "version"))
        self.drift_windows = counter("probe_drift_windows_total", "Windows of requests told.", ("probe", "version"))
        self.streams = gauge("probe_open_streams", "Streams that are open.")
        self.lag_records = gauge("probe_lag_records", "Records between outputs and the log's end.", ("partition",))
        self.lag_seconds = gauge("probe_lag_seconds", "Age of the oldest record without outputs.", ("partition",))


class HostMetrics:
    """The metrics of one point.

    Args:
        families: of the process.
        point: the point.
        watch: windows of its probes.
    """

    def __init__(self, families: ProbeMetrics, point: str, watch: DriftWatch | None = None) -> None:
        self._families = families
        self._point = point
        self._watch = watch or DriftWatch()
        for key in self._watch.told:
            self._drift(key)

    def batch(self, records: Sequence[Record], seconds: float) -> None:
        """Count what one poll gave."""
        families, point = self._families, self._point
        families.received.labels(point).inc(len(records))
        families.received_bytes.labels(point).inc(sum(len(record.value or b"") for record in records))
        families.batch_seconds.labels(point).observe(seconds)

    def counts(self, counts: Counts[tuple[str, str]]) -> None:
        """Add what the core counted."""
        families = self._families
        for (what, cause), count in counts.items():
            if what == "record":
                families.records.labels(self._point, cause).inc(count)
            elif what == "abort":
                families.late_aborts.labels(self._point).inc(count)
            else:
                families.strays.labels(self._point, cause).inc(count)

    def transaction(self, transaction: Transaction, seconds: float, *, written: bool) -> None:
        """Count a transaction and what it made visible."""
        families, point = self._families, self._point
        families.transactions.labels(point, "committed" if written else "aborted").inc()
        families.transaction_seconds.labels(point).observe(seconds)
        if not written:
            return
        for verdict in transaction.verdicts:
            families.verdicts.labels(point, verdict.probe, verdict.kind.value).inc()
            if verdict.kind is VerdictKind.ERROR:
                families.errors.labels(point, verdict.probe).inc()
        for letter in transaction.dead_letters:
            families.letters.labels(point, letter.cause).inc()

    def abort(self, command: ControlCommand) -> None:
        """Count an abort command."""
        self._families.aborts.labels(self._point, command.probe or "").inc()
        if command.captured_at_us is not None and command.decided_at_us is not None:
            seconds = max(0, command.decided_at_us - command.captured_at_us) / 1e6
            self._families.abort_decision.labels(self._point).observe(seconds)

    def drift(self, seen: Seen) -> None:
        """Count what a written transaction carried towards windows of requests."""
        known = set(self._watch.told)
        whole = self._watch.count(seen)
        for key in (self._watch.told.keys() - known) | set(whole):
            self._drift(key)
        for name, version, _ in whole:
            self._families.drift_windows.labels(self._point, name, version).inc()

    def _drift(self, key: Key) -> None:
        families, told = self._families, self._watch.told[key]
        labels = self._point, key[0], key[1]
        for name, value in told.figures.items():
            families.drift.labels(*labels, name).set(value)
        for name, value in told.limits.items():
            families.drift_limits.labels(*labels, name).set(value)
        families.drift_raised.labels(*labels).set(math.nan if told.raised is None else len(told.raised))

    def notice(self, notice: str) -> None:
        """Count a declaration about a position."""
        self._families.notices.labels(self._point, notice).inc()

    def problem(self, problem: str) -> None:
        """Count a partition that could not be read."""
        self._families.problems.labels(self._point, problem).inc()

    def open_streams(self, count: int) -> None:
        """Set the number of open streams."""
        self._families.streams.labels(self._point).set(count)

    def lag(self, partition: str, records: int, seconds: float) -> None:
        """Set the true lag of a partition."""
        self._families.lag_records.labels(self._point, partition).set(records)
        self._families.lag_seconds.labels(self._point, partition).set(seconds)

    def forget(self, partition: str) -> None:
        """Drop the lag of a partition that is somebody else's now."""
        for family in (self._families.lag_records, self._families.lag_seconds):
            family.remove(self._point, partition)
