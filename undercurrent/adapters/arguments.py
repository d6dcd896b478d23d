"""What a caller of an embedded engine gives by name and by hand, checked before an engine sees it."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

from undercurrent.capture.points import MAX_ID_BYTES
from undercurrent.errors import BadRequestError
from undercurrent.protocol.messages import Sampling

# The attempt is added to it.
_MAX_ID_BYTES = MAX_ID_BYTES - 24
_INT63 = (1 << 63) - 1

_WHOLE = ("max_tokens", "top_k", "seed", "n")


def check_request_id(request_id: str) -> None:
    """Check an id that travels through an engine.

    Args:
        request_id: the caller's.

    Raises:
        BadRequestError: it is no text of a sensible length.
    """
    if not isinstance(request_id, str) or not request_id or "\x00" in request_id:
        raise BadRequestError(f"request id {request_id!r:.60}; accepted: a text, without a null character")
    try:
        size = len(request_id.encode())
    except UnicodeEncodeError as exc:
        raise BadRequestError(f"request id {request_id!r:.60} has half a character (a lone surrogate)") from exc
    if size > _MAX_ID_BYTES:
        raise BadRequestError(f"request id {request_id!r:.60} has {size} bytes; accepted: at most {_MAX_ID_BYTES}")


def check_prompt(prompt: str) -> None:
    """Check a prompt; what is in it is the engine's to judge.

    Args:
        prompt: the caller's.

    Raises:
        BadRequestError: it is no text.
    """
    if not isinstance(prompt, str):
        raise BadRequestError(f"the prompt is {type(prompt).__name__}; accepted: a text")


def sampling_of(generation_kwargs: Mapping[str, Any]) -> Sampling:
    """Return sampling parameters given by name; whether their values make sense is the engine's to say.

    Args:
        generation_kwargs: fields of `Sampling`.

    Raises:
        BadRequestError: a name is none of them, a value is of the wrong type, or more than one child is asked for.
    """
    if not isinstance(generation_kwargs, Mapping):
        raise BadRequestError(f"generation_kwargs is {type(generation_kwargs).__name__}; accepted: names with values")
    known = {field.name for field in dataclasses.fields(Sampling)}
    unknown = sorted(str(name) for name in generation_kwargs if name not in known)
    if unknown:
        raise BadRequestError(
            f"unknown sampling parameters: {', '.join(unknown)}; accepted: {', '.join(sorted(known))}"
        )
    values = {name: _value(name, value) for name, value in generation_kwargs.items()}
    if values.get("n", 1) != 1:
        raise BadRequestError("n: an embedded engine answers with one text, so n is 1")
    if values.get("max_tokens") is not None and values["max_tokens"] < 1:
        raise BadRequestError(f"max_tokens is {values['max_tokens']}; it must be at least 1")
    return Sampling(**values)


def _value(name: str, value: Any) -> Any:  # noqa: ANN401 - whatever a caller gives
    if name == "stop":
        return _texts(value)
    if name == "stop_token_ids":
        return _token_ids(value)
    if name == "ignore_eos":
        if not isinstance(value, bool):
            raise _refusal(name, value, "true or false")
        return value
    if value is None and name != "n":
        return None
    if name in _WHOLE:
        return _whole(name, value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise _refusal(name, value, "a number")
    return float(value)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not -_INT63 <= int(value) <= _INT63:
        raise _refusal(name, value, "a whole number of 64 bits")
    return int(value)


def _texts(value: Any) -> tuple[str, ...]:  # noqa: ANN401 - whatever a caller gives
    texts = (value,) if isinstance(value, str) else value or ()
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise _refusal("stop", value, "a text, or a list of texts, none of them empty")
    return tuple(texts)


def _token_ids(value: Any) -> tuple[int, ...]:  # noqa: ANN401 - whatever a caller gives
    if not isinstance(value or (), list | tuple):
        raise _refusal("stop_token_ids", value, "a list of token ids")
    return tuple(_whole("stop_token_ids", token) for token in value or ())


def _refusal(name: str, value: object, accepted: str) -> BadRequestError:
    return BadRequestError(f"bad sampling parameters: {name} is {value!r:.40}; accepted: {accepted}")
