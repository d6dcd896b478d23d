"""Position selectors: which tokens of a request a point wants.

    5                       the token at absolute position 5
    prompt[i]  prompt[-i]   one prompt token, from its start or its end
    generated[i]            one generated token; generated[-i] is known only when the request has ended
    ...[i]+k  ...[i]-k      k positions after or before it
    prompt[*]  prompt[a:b]  all prompt tokens, or a slice of them (b may be left out)
    generated[*]  [a:b]     the same of the generated tokens
    *                       every token

Indices are 0-based. Positions are absolute over prompt plus generation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from undercurrent.errors import PositionSyntaxError
from undercurrent.spec.enums import PositionKind

MAX_POSITION = 2**31 - 1
"""Largest index or offset: positions are int32 on the wire."""

ACCEPTED = (
    "accepted: a whole number, prompt[i], prompt[-i], generated[i], generated[-i] (each with +k or -k behind it), "
    "prompt[*], prompt[a:], prompt[a:b], generated[*], generated[a:], generated[a:b], *"
)

SINGLE_PATTERN = r"([0-9]{1,10}|(prompt|generated)\[-?[0-9]{1,10}\]([+-][0-9]{1,10})?)"
CONTINUOUS_PATTERN = r"(\*|(prompt|generated)\[(\*|[0-9]{1,10}:([0-9]{1,10})?)\])"
"""The text of one token's position, and of many: what a schema can say of them; some of these are still refused."""

_SINGLE = re.compile(r"(prompt|generated)\[(-?[0-9]{1,10})\]([+-][0-9]{1,10})?")
_SLICE = re.compile(r"(prompt|generated)\[(?:(\*)|([0-9]{1,10}):([0-9]{1,10})?)\]")
_SINGLE_KINDS = {PositionKind.ABSOLUTE, PositionKind.PROMPT_INDEX, PositionKind.GENERATED_INDEX}


@dataclass(frozen=True, slots=True)
class PositionSelector:
    """One parsed position. Make it with `parse_position`.

    Args:
        kind: its form.
        index: of a single token: its index in its region, negative from the end; absolute for `ABSOLUTE`.
        offset: positions added to that token.
        start: of a slice: its first index in its region.
        stop: of a slice: the index behind its last, or None for no end.
    """

    kind: PositionKind
    index: int = 0
    offset: int = 0
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        numbers = (self.index, self.offset, self.start, self.stop or 0)
        if any(abs(number) > MAX_POSITION for number in numbers):
            raise PositionSyntaxError(f"a position holds a number above {MAX_POSITION}; {ACCEPTED}")
        if self.kind is PositionKind.ABSOLUTE and self.index < 0:
            raise PositionSyntaxError(f"absolute position {self.index} is negative; {ACCEPTED}")
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise PositionSyntaxError(
                f"slice [{self.start}:{'' if self.stop is None else self.stop}] is empty or negative; {ACCEPTED}"
            )

    @property
    def is_continuous(self) -> bool:
        """Whether it may match more than one token."""
        return self.kind not in _SINGLE_KINDS

    @property
    def needs_final_length(self) -> bool:
        """Whether it can be resolved only once the number of generated tokens is known."""
        return self.kind is PositionKind.GENERATED_INDEX and self.index < 0

    def matches(
        self,
        token_index: int,
        is_generated: bool,
        prompt_len: int,
        generated_index: int | None = None,
        num_generated_total: int | None = None,
    ) -> bool:
        """Return whether a token is wanted.

        Args:
            token_index: absolute position of the token.
            is_generated: whether the token was generated rather than given.
            prompt_len: tokens of the prompt.
            generated_index: its index among the generated tokens; by default `token_index - prompt_len`.
            num_generated_total: generated tokens of the finished request, if known; `generated[-i]` needs it.
        """
        if not self.is_continuous:
            return token_index == self.resolve_absolute(prompt_len, num_generated_total)
        if self.kind is PositionKind.EVERY_TOKEN:
            return True
        if self.kind in (PositionKind.PROMPT_WILDCARD, PositionKind.PROMPT_SLICE):
            return not is_generated and self._in_slice(token_index)
        if not is_generated:
            return False
        return self._in_slice(token_index - prompt_len if generated_index is None else generated_index)

    def _in_slice(self, index: int) -> bool:
        return self.start <= index and (self.stop is None or index < self.stop)

    def resolve_absolute(self, prompt_len: int, num_generated_total: int | None = None) -> int | None:
        """Return the absolute position of a single-token selector.

        Args:
            prompt_len: tokens of the prompt.
            num_generated_total: generated tokens of the finished request, if known.

        Returns:
            The position, or None: there is no such token, it is not known yet, or the selector is continuous.
        """
        if self.kind is PositionKind.ABSOLUTE:
            position: int | None = self.index
        elif self.kind is PositionKind.PROMPT_INDEX:
            position = _within(self.index, prompt_len)
        elif self.kind is PositionKind.GENERATED_INDEX:
            inside = self.index if num_generated_total is None and self.index >= 0 else None
            if num_generated_total is not None:
                inside = _within(self.index, num_generated_total)
            position = None if inside is None else prompt_len + inside
        else:
            return None
        if position is None or position + self.offset < 0:
            return None
        position += self.offset
        total = None if num_generated_total is None else prompt_len + num_generated_total
        return position if total is None or position < total else None

    def bounds(self, prompt_len: int) -> tuple[int, int | None]:
        """Return the absolute positions [first, end) that it may match; end None means no end.

        The span is empty (first == end) where the selector names no token of such a request.

        Raises:
            PositionSyntaxError: it can be resolved only when the request has ended.
        """
        if self.needs_final_length:
            raise PositionSyntaxError(f"position {self.to_raw()!r} is known only when the request has ended")
        if not self.is_continuous:
            position = self.resolve_absolute(prompt_len)
            return (0, 0) if position is None else (position, position + 1)
        if self.kind is PositionKind.EVERY_TOKEN:
            return 0, None
        if self.kind in (PositionKind.PROMPT_WILDCARD, PositionKind.PROMPT_SLICE):
            end = prompt_len if self.stop is None else min(self.stop, prompt_len)
            return min(self.start, end), end
        return prompt_len + self.start, None if self.stop is None else prompt_len + self.stop

    def to_raw(self) -> int | str:
        """Return the selector as a spec writes it; `parse_position` of it is this selector again."""
        if self.kind is PositionKind.ABSOLUTE:
            return self.index
        if self.kind is PositionKind.EVERY_TOKEN:
            return "*"
        region = self.kind.value.partition("_")[0]
        if self.kind in (PositionKind.PROMPT_WILDCARD, PositionKind.GENERATED_WILDCARD):
            return f"{region}[*]"
        if self.is_continuous:
            return f"{region}[{self.start}:{'' if self.stop is None else self.stop}]"
        return f"{region}[{self.index}]{f'{self.offset:+d}' if self.offset else ''}"


def _within(index: int, length: int) -> int | None:
    """Return an index that may count from the end as one from the start, or None outside [0, length)."""
    resolved = index + length if index < 0 else index
    return resolved if 0 <= resolved < length else None


def parse_position(value: int | str | PositionSelector) -> PositionSelector:
    """Return the selector that a spec's `position` means.

    Args:
        value: a whole number or a selector's text; a selector is returned as it is.

    Raises:
        PositionSyntaxError: it is neither.
    """
    if isinstance(value, PositionSelector):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return PositionSelector(PositionKind.ABSOLUTE, index=value)
    if not isinstance(value, str):
        raise PositionSyntaxError(f"a position is text or a whole number, not {type(value).__name__}; {ACCEPTED}")
    text = value.strip()
    if text == "*":
        return PositionSelector(PositionKind.EVERY_TOKEN)
    if re.fullmatch(r"[0-9]{1,10}", text):
        return PositionSelector(PositionKind.ABSOLUTE, index=int(text))
    if single := _SINGLE.fullmatch(text):
        region, index, offset = single.groups()
        if index.startswith("-") and int(index) == 0:
            raise PositionSyntaxError(f"position {text!r}: counting from the end begins at -1; {ACCEPTED}")
        return PositionSelector(PositionKind(f"{region}_index"), index=int(index), offset=int(offset or 0))
    if piece := _SLICE.fullmatch(text):
        region, star, start, stop = piece.groups()
        if star:
            return PositionSelector(PositionKind(f"{region}_wildcard"))
        return PositionSelector(
            PositionKind(f"{region}_slice"), start=int(start), stop=None if stop is None else int(stop)
        )
    raise PositionSyntaxError(f"position {text[:60]!r} is not understood; {ACCEPTED}")
