"""Signals that the router makes itself, and what it does with those of probes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from undercurrent.core import ProbeAction, ProbeSignal
from undercurrent.spec import ActivationRecord, InterventionPolicy

_MAX_TEXT = 200
_SEVERITY = {ProbeAction.CONTINUE: 0, ProbeAction.FLAG: 1, ProbeAction.ABORT: 2}


def describe(exc: BaseException) -> str:
    """Return an error in one short line, whatever its own text does."""
    try:
        return f"{type(exc).__name__}: {exc}"[:_MAX_TEXT]
    except Exception:  # the __str__ of somebody's exception class
        return type(exc).__name__


def error_signal(record: ActivationRecord, exc: BaseException) -> ProbeSignal:
    """Return what stands for a probe that raised: go on, with `router_error` and the error in the metadata."""
    metadata = {
        "router_error": True,
        "error": describe(exc),
        "extraction_point_name": record.extraction_point_name,
    }
    return ProbeSignal(metadata=metadata, token_pos=record.token_pos, layer=record.layer)


def fallback_signal(
    record: ActivationRecord, policy: InterventionPolicy, reason: str, error: BaseException | None = None
) -> ProbeSignal:
    """Return what stands in for an answer that was awaited.

    Args:
        record: the record that was to be judged.
        policy: names the action and the wait.
        reason: `timeout`, `probe_error` or `request_ended`.
        error: what the probe raised.
    """
    metadata: dict[str, Any] = {
        "intervention_fallback": True,
        "reason": reason,
        "extraction_point_name": record.extraction_point_name,
        "timeout_ms": policy.timeout_ms,
    }
    if error is not None:
        metadata |= {"router_error": True, "error": describe(error)}
    action = ProbeAction(policy.on_timeout.value)
    return ProbeSignal(action, metadata, token_pos=record.token_pos, layer=record.layer)


def circuit_signal(name: str, *, opened: bool, threshold: int | None) -> ProbeSignal:
    """Return the event of a circuit: a flag where it opened, go on where it closed."""
    event = "circuit_opened" if opened else "circuit_closed"
    metadata: Mapping[str, Any] = {
        "router_event": event,
        "extraction_point_name": name,
        "circuit_breaker_threshold": threshold,
    }
    return ProbeSignal(ProbeAction.FLAG if opened else ProbeAction.CONTINUE, metadata)


def located(signal: ProbeSignal, record: ActivationRecord, **more: object) -> ProbeSignal:
    """Return the signal with the record's position and layer where it names none, and with more metadata."""
    return replace(
        signal,
        token_pos=record.token_pos if signal.token_pos is None else signal.token_pos,
        layer=record.layer if signal.layer is None else signal.layer,
        metadata={**(signal.metadata or {}), **more} if more else signal.metadata,
    )


def outweighs(signal: ProbeSignal, other: ProbeSignal | None) -> bool:
    """Return whether a signal asks for more than another: continue, then flag, then abort."""
    return other is None or _SEVERITY[signal.action] > _SEVERITY[other.action]
