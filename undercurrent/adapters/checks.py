"""What every engine refuses in a request or a point, whatever runs the model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from undercurrent.adapters.base import EngineRequest
from undercurrent.errors import BadRequestError, CaptureError
from undercurrent.spec import ExtractionPoint


def with_token_id(point: ExtractionPoint, encode: Callable[[str], Sequence[int]]) -> ExtractionPoint:
    """Return a point whose stop token is a token id: where the model runs there are no texts.

    Args:
        point: from a spec.
        encode: text to token ids, without any that a tokenizer adds.

    Raises:
        CaptureError: its text is not one token.
    """
    text = point.until.stop_token
    if not isinstance(text, str):
        return point
    ids = list(encode(text))
    if len(ids) != 1:
        raise CaptureError(
            f"point {point.name!r}: until.stop_token {text!r:.40} is {len(ids)} tokens of this model; accepted: the "
            "text of one token, or its id"
        )
    return dataclasses.replace(point, until=dataclasses.replace(point.until, stop_token=int(ids[0])))


async def checked_request(
    request: EngineRequest,
    encode: Callable[[str], Sequence[int]],
    *,
    vocab_size: int,
    max_model_len: int,
    points: Iterable[ExtractionPoint],
) -> EngineRequest:
    """Return a request with its prompt as token ids.

    Args:
        request: from a sender.
        encode: of the model's tokenizer.
        vocab_size: token ids that the model has.
        max_model_len: most tokens of prompt plus generation.
        points: what requests may capture.

    Raises:
        BadRequestError: it has no prompt or two, token ids that the model does not have, too many of them, or asks for
            a point or an adapter that the engine lacks.
    """
    if (request.prompt is None) == (request.prompt_token_ids is None):
        raise BadRequestError("exactly one of a prompt and prompt token ids is needed")
    token_ids = request.prompt_token_ids
    if token_ids is None:
        # In a thread: a long prompt takes the tokenizer a while, and this loop has other things to do meanwhile.
        token_ids = tuple(await asyncio.to_thread(encode, request.prompt or ""))
    if not token_ids:
        raise BadRequestError("the prompt has no tokens")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise BadRequestError(f"a prompt token id is outside 0 to {vocab_size - 1}")
    wanted = request.sampling.max_tokens or 1
    if len(token_ids) + wanted > max_model_len:
        raise BadRequestError(
            f"{len(token_ids)} prompt tokens and {wanted} to generate are more than the model's {max_model_len}"
        )
    known = {point.name for point in points}
    missing = sorted(set(request.capture.points) - known) if request.capture else []
    if missing:
        raise BadRequestError(f"unknown extraction points: {', '.join(missing)}")
    if request.lora is not None:
        raise BadRequestError(f"LoRA adapter {request.lora!r:.80}: this engine has no LoRA adapters")
    return dataclasses.replace(request, prompt=None, prompt_token_ids=token_ids)
