"""What a client is told of the probes: the extra object `undercurrent` of chunks and responses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any

from undercurrent.adapters.route import PointSignal
from undercurrent.core import ProbeAction, ProbeResult, ProbeSignal


class Results:
    """Keeps what probes say at the end of a request, for whoever expects it; a listener of the router."""

    def __init__(self) -> None:
        self._kept: dict[str, Mapping[str, ProbeResult]] = {}
        self._lock = Lock()

    def expect(self, request_id: str) -> None:
        """Keep the results of a request when they come."""
        self._kept[request_id] = {}

    def __call__(self, request_id: str, results: Mapping[str, ProbeResult]) -> None:
        """Take the results of a request; those that nobody expects, or no longer, are dropped."""
        with self._lock:
            if request_id in self._kept:
                self._kept[request_id] = results

    def take(self, request_id: str) -> Mapping[str, ProbeResult]:
        """Return the results of a request, empty where none came, and expect them no longer."""
        with self._lock:
            return self._kept.pop(request_id, {})


class Reporter:
    """Puts signals and results into plain data.

    Args:
        probes: what each point's probe is called, by the point's name.
    """

    def __init__(self, probes: Mapping[str, str]) -> None:
        self._probes = dict(probes)

    def scores(self, signals: Iterable[PointSignal]) -> dict[str, Any]:
        """Return `scores`, and `errors` where a probe raised: it judged nothing there, and the generation went on."""
        scores, errors = [], []
        for said in signals:
            name, signal = said.extraction_point_name, said.signal
            if signal.metadata.get("router_error"):
                errors.append({"point": name, "probe": self._probes.get(name), "token_pos": signal.token_pos})
            if signal.acts or _score(signal) is not None:
                scores.append(_place(name, signal))
        return {"scores": scores} | ({"errors": errors} if errors else {})

    def stopped(self, said: PointSignal) -> dict[str, Any]:
        """Return the detail of the signal that stopped a request."""
        place = _place(said.extraction_point_name, said.signal)
        detail = {"point": place.pop("point"), "probe": self._probes.get(said.extraction_point_name), **place}
        if said.signal.metadata.get("intervention_fallback"):
            # Not the probe's word, but what stands in for one that did not come.
            detail["fallback"] = said.signal.metadata.get("reason")
        return detail

    def results(self, results: Mapping[str, ProbeResult]) -> list[dict[str, Any]]:
        """Return what each probe said at the end, in the points' order."""
        return [
            {
                "point": name,
                "probe": self._probes.get(name),
                "verdict": _plain(result.verdict),
                "score": _number(result.metadata.get("score")),
            }
            for name, result in results.items()
        ]


def first_abort(signals: Iterable[PointSignal]) -> PointSignal | None:
    """Return the first signal that asks for an end."""
    return next((said for said in signals if said.signal.action is ProbeAction.ABORT), None)


def _place(name: str, signal: ProbeSignal) -> dict[str, Any]:
    return {
        "point": name,
        "layer": signal.layer,
        "token_pos": signal.token_pos,
        "score": _score(signal),
        "action": signal.action.value,
    }


def _score(signal: ProbeSignal) -> float | None:
    return _number(signal.confidence if signal.score is None else signal.score)


def _number(value: Any) -> float | None:  # noqa: ANN401 - a probe's own
    """Return a number that JSON has, or None."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _plain(verdict: Any) -> Any:  # noqa: ANN401 - a probe's own
    if verdict is None or isinstance(verdict, str | bool):
        return verdict
    return _number(verdict)
