"""Probes written as one function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from undercurrent.core.probe import Probe
from undercurrent.core.registry import default_registry
from undercurrent.core.results import ProbeAction, ProbeResult, ProbeSignal, RequestContext, as_action
from undercurrent.errors import ProbeError
from undercurrent.spec import ActivationRecord, ProbeKind

_MOST_SIGNALS = 100
"""How many signals of a request outlast a state: a function may give one for each token."""

ProbeFunction = Callable[[ActivationRecord], "float | bool | ProbeSignal | None"]


class FunctionProbe(Probe):
    """What `probe` makes of a function: it judges each record by itself."""

    probe_kind: ClassVar[ProbeKind] = ProbeKind.SINGLE_SHOT
    probe_name: ClassVar[str] = ""
    threshold: ClassVar[float | None] = None
    action: ClassVar[ProbeAction] = ProbeAction.ABORT
    function: ClassVar[ProbeFunction]

    def __init__(self) -> None:
        self._signals: list[ProbeSignal] = []
        self._score: float | None = None

    def on_activation(self, record: ActivationRecord) -> ProbeSignal | None:
        """Return the function's signal, or the one that its score or answer stands for.

        Raises:
            ProbeError: it returned a NaN, an infinity, or something that is no answer.
        """
        signal = self._read(type(self).function(record), record)
        if signal is not None and signal.acts:
            self._signals.append(signal)
        return signal

    def _read(self, answer: object, record: ActivationRecord) -> ProbeSignal | None:
        if answer is None or isinstance(answer, ProbeSignal):
            return answer
        # NumPy and torch scalars say what they are only as Python numbers.
        item = getattr(answer, "item", None)
        value = item() if callable(item) else answer
        if isinstance(value, bool):
            return self._signal(record, None) if value else None
        if not isinstance(value, int | float):
            raise ProbeError(
                f"probe {self.probe_name!r} returned {type(answer).__name__}; "
                f"accepted: a number, a boolean, a ProbeSignal or None"
            )
        score = float(value)
        if not math.isfinite(score):
            raise ProbeError(f"probe {self.probe_name!r} returned {score} at token {record.token_pos}")
        self._score = score if self._score is None else max(self._score, score)
        if self.threshold is None or score < self.threshold:
            return ProbeSignal(token_pos=record.token_pos, layer=record.layer, score=score)
        return self._signal(record, score)

    def _signal(self, record: ActivationRecord, score: float | None) -> ProbeSignal:
        return ProbeSignal(self.action, token_pos=record.token_pos, layer=record.layer, score=score)

    def on_end(self, ctx: RequestContext) -> ProbeResult:
        """Return `triggered` where it acted at least once, else `clear`."""
        verdict = "triggered" if self._signals else "clear"
        metadata = {} if self._score is None else {"score": self._score}
        return ProbeResult(self.request_id, self.extraction_point_name, verdict, list(self._signals), metadata)

    def state(self) -> dict[str, Any]:
        """Return the state as plain data: the best score, and the first signals."""
        told = [[item.action.value, item.token_pos, item.layer, item.score] for item in self._signals]
        return {"score": self._score, "signals": told[:_MOST_SIGNALS]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ProbeError: it is none of a function probe.
        """
        try:
            self._score = None if state["score"] is None else float(state["score"])
            self._signals = [
                ProbeSignal(as_action(action), token_pos=token_pos, layer=layer, score=score)
                for action, token_pos, layer, score in state["signals"]
            ]
        except (KeyError, TypeError, ValueError) as exc:
            raise ProbeError(f"the state of probe {self.probe_name!r} is damaged: {exc!r}") from exc


def probe(
    name: str, threshold: float | None = None, action: str = "abort"
) -> Callable[[ProbeFunction], type[FunctionProbe]]:
    """Turn a function of one record into a single-shot probe and register it.

    The function returns a score, True or False, a signal, or None. A score at or above the threshold acts, and so does
    True; without a threshold a score is only recorded.

    Args:
        name: what specs and bindings call it.
        threshold: score from which it acts.
        action: what it then asks for: continue, flag or abort.

    Raises:
        ProbeError: another probe has this name, or name, threshold or action is wrong.
    """
    if threshold is not None and not math.isfinite(threshold):
        raise ProbeError(f"probe {name!r}: threshold {threshold} is not finite")
    asked = as_action(action)

    def decorate(function: ProbeFunction) -> type[FunctionProbe]:
        members = {
            "probe_name": name,
            "threshold": None if threshold is None else float(threshold),
            "action": asked,
            "function": staticmethod(function),
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "__qualname__": getattr(function, "__qualname__", name),
        }
        made = type(getattr(function, "__name__", name), (FunctionProbe,), members)
        default_registry.register(name, made)
        return made

    return decorate
