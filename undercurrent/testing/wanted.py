"""Which positions a point must get, asked one by one of what its spec says: the plain truth of tests."""

from __future__ import annotations

from collections.abc import Sequence

from undercurrent.spec import ExtractionPoint


def wanted_positions(
    point: ExtractionPoint, token_ids: Sequence[int], prompt_len: int, *, cached: int = 0, stop: int | None = None
) -> list[int]:
    """Return the positions of a request's rows at a point, ascending.

    Args:
        point: from a spec.
        token_ids: of every computed position: all but the last of prompt and generation.
        prompt_len: tokens of the prompt.
        cached: positions below this were not computed.
        stop: token id of `until: stop_token`; the point's own by default.
    """
    selector, computed = point.position, len(token_ids)
    if point.needs_final_length:
        generated = computed - prompt_len
        named = selector.resolve_absolute(prompt_len, generated) if generated > 0 else None
        return [] if named is None or named < cached else [named]
    end = point.until.stop_token if stop is None else stop
    found = []
    for position, token in enumerate(token_ids):
        is_generated = position >= prompt_len
        if position >= cached and point.matches(position, is_generated, prompt_len):
            found.append(position)
        if token == end and selector.matches(position, is_generated, prompt_len):
            break
    return found
