"""What was measured once: `python -m benchmarks.plan_constants` (docs/benchmarks.md)."""

from __future__ import annotations

from undercurrent.capacity.calibration import ProbeCost

LINEAR_WIDTH = 4096
LINEAR = ProbeCost(record_s=11.9e-6, row_s=24.3e-6)
"""What a linear probe costs that reads one layer of that width in bfloat16."""

JOINING = ProbeCost(record_s=53.3e-6, row_s=13.3e-6)
"""What a record costs to decode and join of a point that publishes one layer of that width in bfloat16."""


def joining_cost(width: int) -> ProbeCost:
    """Return what joining costs on rows of so many elements at each point, on average."""
    return ProbeCost(record_s=JOINING.record_s, row_s=JOINING.row_s * width / LINEAR_WIDTH)


def linear_cost(width: int) -> ProbeCost:
    """Return what a linear probe costs on rows of a width: a row's time goes with its elements."""
    return ProbeCost(record_s=LINEAR.record_s, row_s=LINEAR.row_s * width / LINEAR_WIDTH)
