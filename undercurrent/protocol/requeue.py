"""What failed on its way back: which may be requeued, how the record says so, and how its dead letter does. No client.

What a request ended as stands for ever, and inside the window of repeats its id is known. A prompt that can be read
runs again under its request's next id, which follows from the old one, so that a request which is requeued twice runs
once: the second is answered as the first one's duplicate.

A dead-letter topic keeps what it has, so that a letter cannot be marked. Two notes go with it instead, in its partition
of that topic: one before the record is written back, one after it. Whoever finds the first alone does not know whether
the record is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from undercurrent.errors import ProbingError
from undercurrent.protocol.dead_letters import PREFIX, Headers, Place, said_of
from undercurrent.protocol.generations import RequestState
from undercurrent.protocol.messages import Outcome, PromptRequest
from undercurrent.topics import DLQ_SUFFIX, MAX_REQUEST_ID_BYTES

ORIGIN = "requeued_from"
"""Key in the metadata of a requeued prompt, of the id that failed."""
_NUMBERED = re.compile(r"^(.*)~([1-9][0-9]*)$", re.DOTALL)

REQUEUED_FROM = f"{PREFIX}requeued_from"
"""Header of a record that was a dead letter: the letter's topic, partition and offset, separated by colons."""

HOMELESS = ("bad_key", "bad_partition")
"""Causes of prompts that lie where their key does not belong: written back, they would be dead-lettered again."""


class RequeueError(ProbingError):
    """A request cannot be run again.

    Args:
        request_id: its id.
        reason: why, and what would be right.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        self.request_id = request_id
        super().__init__(f"request {request_id}: {reason}")


def next_id(request_id: str) -> str:
    """Return the id under which a request runs again: `r`, `r~2`, `r~3`, ...

    Raises:
        RequeueError: it would be too long.
    """
    match = _NUMBERED.match(request_id)
    stem, number = (match[1], int(match[2])) if match is not None else (request_id, 1)
    following = f"{stem}~{number + 1}"
    if len(following.encode()) > MAX_REQUEST_ID_BYTES:
        raise RequeueError(request_id, f"its next id is longer than {MAX_REQUEST_ID_BYTES} bytes; send it anew")
    return following


def run_again(prompt: PromptRequest, now_us: int) -> PromptRequest:
    """Return the prompt that runs a failed request again; its deadline, which has passed or will soon, is left out.

    Args:
        prompt: that failed.
        now_us: microseconds since the Unix epoch.

    Raises:
        RequeueError: its next id would be too long.
    """
    return replace(
        prompt,
        request_id=next_id(prompt.request_id),
        deadline_us=None,
        created_at_us=now_us,
        metadata={**prompt.metadata, ORIGIN: prompt.request_id},
    )


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of a requeue.

    Args:
        letter: offset of the letter, in the partition of this note.
        at_ms: when, milliseconds since the Unix epoch.
        to: partition and offset of the record in its source topic, None while that is not known.
    """

    letter: int
    at_ms: int
    to: tuple[int, int] | None = None

    def headers(self) -> tuple[tuple[str, bytes], ...]:
        """Return the headers of the record that says so."""
        said = {"requeued_letter": str(self.letter), "requeued_at_ms": str(self.at_ms)}
        if self.to is not None:
            said["requeued_to"] = f"{self.to[0]}:{self.to[1]}"
        return tuple((PREFIX + name, text.encode()) for name, text in said.items())

    def __str__(self) -> str:
        if self.to is None:
            return f"letter {self.letter}: a requeue was begun"
        return f"letter {self.letter} was requeued, to partition {self.to[0]} offset {self.to[1]}"


def read_note(said: Mapping[str, str]) -> Note | None:
    """Return the note in what the headers of a dead-letter topic's record say; None where it is a letter."""
    try:
        at = int(said["requeued_letter"]), int(said["requeued_at_ms"])
        if "requeued_to" not in said:
            return Note(*at)
        partition, offset = map(int, said["requeued_to"].split(":"))
        return Note(*at, (partition, offset))
    except (KeyError, ValueError):
        return None


def requeued_headers(headers: Headers, letter: Place) -> tuple[tuple[str, bytes], ...]:
    """Return the headers of a record that goes back: its own, and the letter that it was."""
    own = tuple((name, text or b"") for name, text in headers if not name.startswith(PREFIX))
    return (*own, (REQUEUED_FROM, f"{letter.topic}:{letter.partition}:{letter.offset}".encode()))


def requeued_from(headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Return whether a record was a dead letter before."""
    return any(name == REQUEUED_FROM for name, _ in headers)


def objection_to_letter(prefix: str, letter: Place, value: bytes | None, headers: Headers) -> str | None:
    """Return why a letter may not be requeued whatever became of its request, None where it may.

    Args:
        prefix: first part of the topics' names.
        letter: where it lies.
        value: its bytes.
        headers: its headers.
    """
    said = said_of(headers)
    if read_note(said) is not None:
        return "it is the note of a requeue, not a letter"
    source = said.get("topic")
    if source is None or source + DLQ_SUFFIX != letter.topic or said.get("partition") != str(letter.partition):
        return f"its headers do not say that it comes from partition {letter.partition} of the topic of these letters"
    if "to_offset" in said:
        return "it stands for records that are gone: there are no bytes to write back"
    if "length" in said or value is None:
        return "its bytes are cut or were never there: send the original anew"
    if source != f"{prefix}.prompts":
        return (
            f"a record of {source} is part of a sequence that has gone on without it: behind it, it would be a stray "
            "again; `undercurrent replay` judges what is recorded"
        )
    if said.get("cause") in HOMELESS:
        return f"{said.get('detail')}: there it would be dead-lettered again; send it under its right key"
    return None


def objection_to_prompt(request_id: str, state: RequestState | None) -> str | None:
    """Return why the prompt of a request may not be requeued, None where it may: only after a failed final.

    Args:
        request_id: the request.
        state: what the generations log says of it.
    """
    if state is None:
        return f"no engine worker has ended the request {request_id!r} yet: it has no failed final"
    if not state.closed:
        return f"the request {request_id!r} is still open, with attempt {state.attempt} of {state.engine}"
    kept = sorted({str(final.outcome) for final in state.finals.values() if final.outcome is not Outcome.FAILED})
    if kept:
        return f"the request {request_id!r} has a result ({', '.join(kept)}): only failed ones are run again"
    return None
