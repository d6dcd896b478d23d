"""Generations on a terminal: one request as it is written, several as they end, or every event as a JSON line."""

from __future__ import annotations

from typing import Protocol, TextIO

from undercurrent.cli.jsonl import dumps, message_dict
from undercurrent.counts import counted
from undercurrent.protocol.messages import GenerationEvent, GenerationKind, GuardState, Outcome

SUCCEEDED = (Outcome.COMPLETED, Outcome.ABORTED)


class View(Protocol):
    """Shows events."""

    def show(self, event: GenerationEvent) -> None:
        """Show one event that counts."""


class JsonView:
    """Every event as one JSON line.

    Args:
        out: where to.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, event: GenerationEvent) -> None:
        """Write the event, every field of it."""
        self._out.write(dumps(message_dict(event)) + "\n")
        self._out.flush()


class StreamView:
    """The text of one request with one child as it comes, then one line about its end.

    Args:
        out: where the text goes.
        notes: where the rest goes.
    """

    def __init__(self, out: TextIO, notes: TextIO) -> None:
        self._out = out
        self._notes = notes
        self._attempt: int | None = None
        self._column_0 = True

    def show(self, event: GenerationEvent) -> None:
        """Write what is new."""
        if self._attempt is not None and event.attempt != self._attempt and event.kind is not GenerationKind.REFUSED:
            self._note(f"attempt {event.attempt} starts over")
        if event.kind in (GenerationKind.TOKENS, GenerationKind.FINAL):
            self._attempt = event.attempt
        if event.text:
            self._out.write(event.text)
            self._out.flush()
            self._column_0 = event.text.endswith("\n")
        if event.kind is not GenerationKind.TOKENS:
            self._note(end_line(event))

    def _note(self, text: str) -> None:
        if not self._column_0:
            self._out.write("\n")
            self._out.flush()
            self._column_0 = True
        self._notes.write(f"[{text}]\n")
        self._notes.flush()


class BlockView:
    """Several requests: each child's whole text when it has ended, under a line that names it.

    Args:
        out: where to.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._texts: dict[tuple[str, int], tuple[int, str]] = {}

    def show(self, event: GenerationEvent) -> None:
        """Keep the text, or write it when its child has ended."""
        child = (event.request_id, event.index)
        if event.kind not in (GenerationKind.TOKENS, GenerationKind.FINAL):
            self._out.write(f"--- {end_line(event)}\n")
            return
        attempt, text = self._texts.get(child, (event.attempt, ""))
        # What an earlier attempt wrote is void as soon as a later one writes.
        text = event.text if attempt != event.attempt else text + event.text
        self._texts[child] = (event.attempt, text)
        if event.kind is GenerationKind.FINAL:
            del self._texts[child]
            self._out.write(f"--- {end_line(event)}\n{text}\n")
            self._out.flush()


def end_line(event: GenerationEvent) -> str:
    """Return one line about an event that is no tokens: how its request ended, and why."""
    name = event.request_id if event.index == 0 else f"{event.request_id} child {event.index}"
    if event.kind is GenerationKind.DUPLICATE:
        return f"{name}: a prompt of this id with the same content was sent before; its result follows"
    if event.kind is GenerationKind.REFUSED:
        return f"{name}: refused, another prompt has this id{_colon(event.error)}"
    parts = [f"{name}: {event.outcome or Outcome.UNKNOWN}", counted(event.generated_tokens, "token")]
    if event.abort is not None:
        by = event.abort.probe or event.abort.source
        score = "" if event.abort.score is None else f", score {event.abort.score:.3f}"
        place = "" if event.abort.token_pos is None else f" at position {event.abort.token_pos}"
        parts.append(f"by {by}{place}{score}{_colon(event.abort.reason)}")
    elif event.error:
        parts.append(event.error)
    elif event.finish_reason:
        parts.append(event.finish_reason)
    weak = [f"{guard.probe} {guard.state}" for guard in event.guards if guard.state is not GuardState.COMPLETE]
    if weak:
        parts.append(f"guards: {', '.join(weak)}")
    return ", ".join(parts)


def failed(event: GenerationEvent) -> bool:
    """Return whether an event says that a request gave no result."""
    if event.kind is GenerationKind.REFUSED:
        return True
    return event.kind is GenerationKind.FINAL and event.outcome not in SUCCEEDED


def _colon(text: str | None) -> str:
    return f": {text}" if text else ""
