"""A record of the prompts topic as a prompt that the protocol can decide on, or what is wrong with it. No client."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from undercurrent.codec import Codec
from undercurrent.errors import DecodeError
from undercurrent.kafka.records import Record
from undercurrent.protocol.frames import body_of
from undercurrent.protocol.messages import PromptRequest, Sampling
from undercurrent.protocol.worker_partition import Finished
from undercurrent.protocol.worker_types import Defect, Prompt
from undercurrent.topics import MAX_REQUEST_ID_BYTES, partition_of

BAD_REQUEST = "bad_request"
UNDECODABLE = "undecodable"
BAD_KEY = "bad_key"
BAD_PARTITION = "bad_partition"

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What prompts are checked against before the engine sees them.

    Args:
        model: name of the model that is served.
        points: names of the extraction points.
        prompt_partitions: number of partitions of the prompts topic.
        activation_partitions: number of partitions of each activations topic.
        max_children: most continuations of one prompt.
    """

    model: str
    points: Sequence[str]
    prompt_partitions: int
    activation_partitions: int
    max_children: int


def read_prompt(codec: Codec, record: Record, offer: Offer) -> Prompt | Defect:
    """Return the prompt in a record; a Defect alone where it names no request of this partition."""
    defect = _misplaced(record, offer.prompt_partitions)
    if defect is not None:
        return defect
    request_id = (record.key or b"").decode()
    content_hash = content_hash_of(record)
    try:
        request = codec.decode(record.value)
    except DecodeError as exc:
        return _unfit(request_id, record, content_hash, Defect(kind=UNDECODABLE, error=f"no PromptRequest: {exc}"))
    if not isinstance(request, PromptRequest):
        error = f"a {type(request).__name__} on the prompts topic; it takes a PromptRequest"
        return _unfit(request_id, record, content_hash, Defect(kind=UNDECODABLE, error=error))
    if request.request_id != request_id:
        return Defect(kind=BAD_KEY, error="the record's key is not the prompt's request id")
    wrong = objection(request, offer)
    points = tuple(offer.points) if request.points is None else tuple(dict.fromkeys(request.points))
    return Prompt(
        request_id=request_id,
        offset=record.offset,
        content_hash=content_hash,
        points=points if wrong is None else (),
        stream_partition=partition_of(request_id, offer.activation_partitions),
        n=request.sampling.n if wrong is None else 1,
        deadline_us=request.deadline_us,
        defect=None if wrong is None else Defect(kind=BAD_REQUEST, error=wrong),
        request=request,
        source=record,
    )


def content_hash_of(record: Record) -> bytes:
    """Return the SHA-256 of a prompt's body, without the frame around it."""
    return hashlib.sha256(body_of(record.value or b"")).digest()


def finished_below(end: int, records: Iterable[Record]) -> dict[str, Finished]:
    """Return the prompts below an offset by their ids; of a repeated id the first one, which the others repeat.

    Args:
        end: the offset.
        records: of one partition, in its order.
    """
    found: dict[str, Finished] = {}
    for record in records:
        if record.key and record.offset < end:
            found.setdefault(record.key.decode(errors="replace"), Finished(record.offset, content_hash_of(record)))
    return found


def objection(request: PromptRequest, offer: Offer) -> str | None:
    """Return what is wrong with a prompt and what would be right, None where only the engine can tell."""
    if (request.prompt is None) == (request.prompt_token_ids is None):
        return "exactly one of prompt and prompt_token_ids is needed"
    if request.model is not None and request.model != offer.model:
        return f"this engine serves {offer.model!r}, the prompt expects {request.model!r}"
    unknown = sorted(set(request.points or ()) - set(offer.points))
    if unknown:
        return f"unknown extraction points: {', '.join(unknown)}; known: {', '.join(offer.points) or 'none'}"
    return _bad_sampling(request.sampling, offer.max_children)


def _bad_sampling(sampling: Sampling, max_children: int) -> str | None:
    if not 1 <= sampling.n <= max_children:
        return f"sampling.n is {sampling.n}; accepted: 1 to {max_children}"
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        return f"sampling.max_tokens is {sampling.max_tokens}; it must be at least 1"
    if sampling.top_p is not None and not 0.0 < sampling.top_p <= 1.0:
        return f"sampling.top_p is {sampling.top_p}; accepted: above 0, at most 1"
    if sampling.top_k is not None and sampling.top_k < -1:
        return f"sampling.top_k is {sampling.top_k}; accepted: -1 or 0 for all, else above 0"
    if sampling.repetition_penalty is not None and not 0.0 < sampling.repetition_penalty < inf:
        return f"sampling.repetition_penalty is {sampling.repetition_penalty}; it must be above 0 and finite"
    for name, least, most in _RANGES:
        value = getattr(sampling, name)
        # Written so that NaN is refused too.
        if value is not None and not least <= value <= most:
            return f"sampling.{name} is {value}; accepted: {least:g} to {most:g}"
    return None


def _misplaced(record: Record, partitions: int) -> Defect | None:
    if not record.key:
        return Defect(kind=BAD_KEY, error="the record has no key; it must be the request id")
    try:
        request_id = record.key.decode()
    except UnicodeDecodeError:
        return Defect(kind=BAD_KEY, error="the record's key is not UTF-8; it must be the request id")
    if len(record.key) > MAX_REQUEST_ID_BYTES:
        error = f"the request id has {len(record.key)} bytes; accepted: up to {MAX_REQUEST_ID_BYTES}"
        return Defect(kind=BAD_KEY, error=error)
    right = partition_of(request_id, partitions)
    if right != record.partition:
        return Defect(kind=BAD_PARTITION, error=f"this key belongs to partition {right} (murmur2), not here")
    return None


def _unfit(request_id: str, record: Record, content_hash: bytes, defect: Defect) -> Prompt:
    return Prompt(request_id=request_id, offset=record.offset, content_hash=content_hash, defect=defect, source=record)
