"""The core of a loop: of one point, or of several that it joins."""

from __future__ import annotations

from probe_consumers.inputs import Inputs
from undercurrent.codec.tensors import row_bytes, rows_of
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import StreamRunner
from undercurrent.protocol.host_states import Keeping
from undercurrent.protocol.join_runner import JoinRunner
from undercurrent.protocol.joined_stream import RowFormat
from undercurrent.protocol.joining_host import JoiningHost


def core_of(
    inputs: Inputs,
    fingerprint: str,
    runner: StreamRunner,
    abort_max_age_us: int,
    *,
    contiguous: bool = True,
    keeping: Keeping | None = None,
) -> ProbeHost:
    """Return what decides for a loop.

    Args:
        inputs: what it reads.
        fingerprint: of the probe set.
        runner: runs the probes.
        abort_max_age_us: an older record aborts nothing.
        contiguous: every offset is expected; False where records are left out on purpose.
        keeping: how states of long streams are kept; None where they are not.
    """
    points, lanes = inputs.points, inputs.lanes
    if not inputs.joined:
        return ProbeHost(points[0], fingerprint, runner, abort_max_age_us, contiguous=contiguous, keeping=keeping)
    joins = JoinRunner(runner, lanes, points, RowFormat(row_bytes, rows_of))
    return JoiningHost(points, fingerprint, joins, lanes, abort_max_age_us, contiguous=contiguous, keeping=keeping)
