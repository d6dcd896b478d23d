"""In-process dispatch of records to probes: what runs beside an embedded engine, without a broker.

with Router(default_registry) as router, router.request(extraction_points=spec) as request:
    signal = request.route(record)
request.results["residual"].verdict
"""

from undercurrent.errors import RouterError
from undercurrent.router.metrics import MetricsSnapshot
from undercurrent.router.requests import RequestHandle
from undercurrent.router.router import OverflowPolicy, Router

__all__ = ["MetricsSnapshot", "OverflowPolicy", "RequestHandle", "Router", "RouterError"]
