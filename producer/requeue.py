"""Running a failed request again: which request is, from the records of its partitions. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from producer.follow import Decoder, LogRecord
from undercurrent.errors import DecodeError
from undercurrent.protocol.generations import GenerationsReader, RequestState
from undercurrent.protocol.messages import Accepted, GenerationEvent, Outcome, PromptRequest, Released
from undercurrent.protocol.requeue import RequeueError, run_again


def requeued(
    request_id: str,
    prompts: Iterable[LogRecord],
    generations: Iterable[LogRecord],
    decoder: Decoder,
    *,
    now_us: int,
) -> PromptRequest:
    """Return the prompt that runs a failed request again.

    Args:
        request_id: that failed.
        prompts: records of its prompts partition.
        generations: records of its generations partition, from the start of the log.
        decoder: decodes records.
        now_us: microseconds since the Unix epoch.

    Raises:
        RequeueError: its prompt is not on the topic any more, it has not ended, or it did not fail.
    """
    found = _prompt(request_id, prompts, decoder)
    if found is None:
        raise RequeueError(request_id, "no prompt of this id is on the topic that can be read; send it anew")
    state = _state(request_id, generations, decoder)
    if state is None or not state.closed:
        raise RequeueError(request_id, "it has not ended; wait for its final")
    outcomes = {final.outcome for final in state.finals.values()}
    if outcomes != {Outcome.FAILED}:
        ended = ", ".join(sorted("unknown" if outcome is None else outcome.value for outcome in outcomes))
        raise RequeueError(request_id, f"it ended as {ended}; only a failed request is run again")
    return run_again(found, now_us)


def _prompt(request_id: str, records: Iterable[LogRecord], decoder: Decoder) -> PromptRequest | None:
    """Return the first prompt of an id: a later one was only answered as its duplicate."""
    for record in records:
        if record.key == request_id.encode():
            try:
                message = decoder.decode(record.value)
            except DecodeError:
                return None
            return message if isinstance(message, PromptRequest) else None
    return None


def _state(request_id: str, records: Iterable[LogRecord], decoder: Decoder) -> RequestState | None:
    rules = GenerationsReader()
    for record in records:
        if record.key == request_id.encode():
            try:
                message = decoder.decode(record.value)
            except DecodeError:
                continue  # the log is checked by those who write it
            if isinstance(message, Accepted | Released | GenerationEvent):
                rules.apply(message, offset=record.offset)
    return rules.get(request_id)
