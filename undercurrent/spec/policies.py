"""What a point says besides where it looks: until when, and what an inline probe may hold up."""

from __future__ import annotations

from dataclasses import dataclass

from undercurrent.errors import SpecValidationError
from undercurrent.spec.enums import InterventionMode, TimeoutAction, UntilKind
from undercurrent.spec.values import as_enum


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
        if self.count is not None and (isinstance(self.count, bool) or self.count < 1):
            raise SpecValidationError(f"count is {self.count!r}; accepted: 1 or more", field="until.count")
        token = self.stop_token
        if token == "" or isinstance(token, bool) or (isinstance(token, int) and token < 0):
            raise SpecValidationError(f"{token!r}; accepted: a token id or a text", field="until.stop_token")


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
        if self.timeout_ms is not None and (isinstance(self.timeout_ms, bool) or self.timeout_ms < 1):
            raise SpecValidationError(
                f"{self.timeout_ms!r}; accepted: 1 or more milliseconds", field="intervention.timeout_ms"
            )
