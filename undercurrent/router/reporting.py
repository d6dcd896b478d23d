"""Sinks and listeners: whoever else hears of signals, figures and results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

from undercurrent.core import ProbeResult, ProbeSignal
from undercurrent.errors import RouterError
from undercurrent.router.metrics import MetricsSnapshot

LogSink = Callable[[str, str, ProbeSignal], object]
MetricsSink = Callable[[str, str, MetricsSnapshot], object]
EndListener = Callable[[str, dict[str, ProbeResult]], object]

_log = logging.getLogger(__name__)


class _Hearer:
    """One sink or listener; what it raises is counted, and logged the first time."""

    def __init__(self, call: Callable[..., object]) -> None:
        if not callable(call):
            raise RouterError(f"{call!r:.60} cannot be called; accepted: a function")
        self._call = call
        self.error_count = 0

    def tell(self, *arguments: object) -> None:
        try:
            self._call(*arguments)
        except Exception:  # somebody else's code: it never breaks routing
            self.error_count += 1
            if self.error_count == 1:
                _log.exception("%r raised; it is called on, and further errors of it are only counted", self._call)


class Reporter:
    """Tells sinks and listeners, in the order in which they came."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._log_sinks: tuple[_Hearer, ...] = ()
        self._metrics_sinks: tuple[_Hearer, ...] = ()
        self._listeners: tuple[_Hearer, ...] = ()

    @property
    def error_count(self) -> int:
        """Times that a sink or listener raised."""
        return sum(hearer.error_count for hearer in (*self._log_sinks, *self._metrics_sinks, *self._listeners))

    def add_log_sink(self, sink: LogSink) -> None:
        """Tell it of signals."""
        hearer = _Hearer(sink)
        with self._lock:
            self._log_sinks = (*self._log_sinks, hearer)

    def add_metrics_sink(self, sink: MetricsSink) -> None:
        """Tell it of figures at the end of requests."""
        hearer = _Hearer(sink)
        with self._lock:
            self._metrics_sinks = (*self._metrics_sinks, hearer)

    def add_listener(self, listener: EndListener) -> None:
        """Tell it of results."""
        hearer = _Hearer(listener)
        with self._lock:
            self._listeners = (*self._listeners, hearer)

    def signal(self, request_id: str, name: str, signal: ProbeSignal) -> None:
        """Tell the log sinks."""
        for sink in self._log_sinks:
            sink.tell(request_id, name, signal)

    def metrics(self, request_id: str, name: str, snapshot: MetricsSnapshot) -> None:
        """Tell the metrics sinks."""
        for sink in self._metrics_sinks:
            sink.tell(request_id, name, snapshot)

    def ended(self, request_id: str, results: dict[str, ProbeResult]) -> None:
        """Tell the listeners, each with a dict of its own."""
        for listener in self._listeners:
            listener.tell(request_id, dict(results))
