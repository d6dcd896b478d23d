"""What a point says besides where it looks: until when, and what an inline probe may hold up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from undercurrent.errors import SpecValidationError
from undercurrent.spec.enums import InterventionMode, TimeoutAction, UntilKind
from undercurrent.spec.values import MAX_NUMBER, as_count, as_enum, as_text, shown


@dataclass(frozen=True, slots=True)
class UntilPolicy:
    """What ends the capture of a continuous position.

    Args:
        kind: the rule.
        count: of `fixed_count`: tokens to capture.
        stop_token: of `stop_token`: a token id, or the token's text; that token is the last one captured.

    Raises:
        SpecValidationError: the rule lacks its value, or has another rule's.
    """

    kind: UntilKind = UntilKind.GENERATION_END
    count: int | None = None
    stop_token: int | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", as_enum(UntilKind, self.kind, "until.kind"))
        if (self.count is not None) != (self.kind is UntilKind.FIXED_COUNT):
            raise SpecValidationError("count belongs to fixed_count, which needs it", field="until.count")
        if (self.stop_token is not None) != (self.kind is UntilKind.STOP_TOKEN):
            raise SpecValidationError("stop_token belongs to the rule stop_token, which needs it", field="until")
        if self.count is not None:
            as_count(self.count, "until.count")
        if self.stop_token is not None:
            _check_token(self.stop_token)


def spread_until(value: object) -> object:
    """Read the short forms of a file: `generation_end`, `{fixed_count: 3}`, `{stop_token: 42}`."""
    if isinstance(value, str):
        return {"kind": value}
    if isinstance(value, Mapping) and "kind" not in value and len(value) == 1:
        if "fixed_count" in value:
            return {"kind": "fixed_count", "count": value["fixed_count"]}
        if "stop_token" in value:
            return {"kind": "stop_token", "stop_token": value["stop_token"]}
    return value


def as_until(value: object, point: str | None = None) -> UntilPolicy:
    """Return the rule that a value means: a policy, or any form that a file may have.

    Raises:
        SpecValidationError: it means none.
    """
    if isinstance(value, UntilPolicy):
        return value
    spread = spread_until(value)
    if not isinstance(spread, Mapping) or not {"kind"} <= set(spread) <= {"kind", "count", "stop_token"}:
        accepted = "an UntilPolicy, generation_end, {fixed_count: N}, {stop_token: TOKEN}"
        raise SpecValidationError(f"{shown(value)}; accepted: {accepted}", point=point, field="until")
    try:
        return UntilPolicy(**spread)
    except SpecValidationError as exc:
        raise SpecValidationError(exc.reason, point=point, field=exc.field) from None


def _check_token(token: object) -> None:
    if isinstance(token, str) and token:
        as_text(token, "until.stop_token", blank=True)  # a line break is a fine token
    elif isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_NUMBER:
        raise SpecValidationError(f"{shown(token)}; accepted: a token id or a text", field="until.stop_token")


@dataclass(frozen=True, slots=True)
class InterventionPolicy:
    """How an inline probe may hold up a generation.

    Args:
        mode: `reject` acts on what the probe says; `block_until_signal` also waits for it to say something.
        timeout_ms: longest wait; `block_until_signal` needs it.
        on_timeout: what stands in for the probe after that wait.

    Raises:
        SpecValidationError: the three do not fit together.
    """

    mode: InterventionMode = InterventionMode.REJECT
    timeout_ms: int | None = None
    on_timeout: TimeoutAction = TimeoutAction.CONTINUE

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", as_enum(InterventionMode, self.mode, "intervention.mode"))
        object.__setattr__(self, "on_timeout", as_enum(TimeoutAction, self.on_timeout, "intervention.on_timeout"))
        if self.mode is InterventionMode.BLOCK_UNTIL_SIGNAL and self.timeout_ms is None:
            raise SpecValidationError("mode block_until_signal needs it", field="intervention.timeout_ms")
        if self.mode is InterventionMode.REJECT and self.timeout_ms is not None:
            raise SpecValidationError("mode reject waits for nothing: leave it out", field="intervention.timeout_ms")
        if self.mode is InterventionMode.REJECT and self.on_timeout is not TimeoutAction.CONTINUE:
            raise SpecValidationError("mode reject never times out: leave it out", field="intervention.on_timeout")
        if self.timeout_ms is not None:
            as_count(self.timeout_ms, "intervention.timeout_ms")
