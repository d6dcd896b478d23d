"""Whether a router is used as it is meant to be."""

from __future__ import annotations

from collections.abc import Iterable

from undercurrent.core import RequestContext
from undercurrent.errors import RouterError
from undercurrent.spec import ExtractionPoint, Overflow

_LONGEST_S = 86_400.0


def check_count(name: str, value: int) -> None:
    """Check a whole number of 1 or more.

    Raises:
        RouterError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RouterError(f"{name} is {value!r:.40}; accepted: a whole number of 1 or more")


def seconds(name: str, value: float) -> float:
    """Return a duration.

    Raises:
        RouterError: it is none that a thread can wait.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_S:
        raise RouterError(f"{name} is {value!r:.40}; accepted: seconds from 0 to {_LONGEST_S:g}")
    return float(value)


def overflow(value: str) -> Overflow:
    """Return the policy of that name.

    Raises:
        RouterError: there is none.
    """
    try:
        return Overflow(value)
    except ValueError:
        raise RouterError(f"default_overflow_policy is {value!r:.40}; accepted: {', '.join(Overflow)}") from None


def check_request(request_id: str, ctx: RequestContext | None) -> None:
    """Check an id and a context.

    Raises:
        RouterError: one is of the wrong kind, or they do not fit together.
    """
    if not isinstance(request_id, str) or not request_id:
        raise RouterError(f"request id {request_id!r:.60}; accepted: a text")
    if ctx is None:
        return
    if not isinstance(ctx, RequestContext):
        raise RouterError(f"the context is {type(ctx).__name__}; accepted: a RequestContext or None")
    if ctx.request_id != request_id:
        raise RouterError(f"the context is of request {ctx.request_id!r:.60}, not of {request_id!r:.60}")


def checked_points(points: Iterable[ExtractionPoint]) -> list[ExtractionPoint]:
    """Return the points.

    Raises:
        RouterError: something else is among them.
    """
    if isinstance(points, str | ExtractionPoint) or not isinstance(points, Iterable):
        raise RouterError(f"extraction_points is {type(points).__name__}; accepted: a list of points, or a ProbeSpec")
    chosen = list(points)
    for point in chosen:
        if not isinstance(point, ExtractionPoint):
            raise RouterError(f"extraction_points hold {type(point).__name__}; accepted: ExtractionPoint")
    return chosen
