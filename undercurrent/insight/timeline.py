"""One request as a time line over all topics: what happened to it, in the order in which the brokers wrote it down.

Pure: records in, entries out. Tokens and activations are told by the run, not by the record; scores as a curve.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from undercurrent.counts import counted
from undercurrent.insight.curves import Curve
from undercurrent.insight.words import said_of_message
from undercurrent.protocol.audit import Heard
from undercurrent.protocol.generations import GenerationsReader, Ruling
from undercurrent.protocol.messages import (
    Accepted,
    ActivationBlock,
    GenerationEvent,
    GenerationKind,
    ProbeVerdict,
    PromptRequest,
    PublisherStarted,
    Released,
    StreamEnded,
    StreamInvalidated,
    StreamStarted,
    VerdictKind,
)
from undercurrent.protocol.requeue import read_note
from undercurrent.protocol.streams import Arrived, Closed, Stray, StreamTable
from undercurrent.topics import DLQ_SUFFIX


@dataclass(slots=True, kw_only=True)
class Entry:
    """One line.

    Args:
        at_ms: when the broker appended the record, milliseconds since the Unix epoch.
        until_ms: of what several records tell, when the last of them was.
        what: a word for it.
        text: in words.
        where: topic, partition and offset of the record, the first of several.
        void: it counts for nobody.
        facts: as data.
    """

    at_ms: int
    what: str
    text: str
    where: tuple[str, int, int]
    until_ms: int | None = None
    void: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Tokens:
    entry: Entry
    count: int = 0
    events: int = 0


@dataclass(slots=True)
class _Rows:
    entry: Entry
    records: int = 0
    rows: int = 0
    last: int = -1
    gap: bool = False


class TimeLine:
    """Collects what the topics say of one request.

    Args:
        request_id: the request.
        prefix: first part of the topics' names.
        erased: its prompt's text is not to be shown.
    """

    def __init__(self, request_id: str, prefix: str, *, erased: bool = False) -> None:
        self.request_id = request_id
        self._erased = erased
        self.curves: dict[tuple[int, int, str, str], Curve] = defaultdict(Curve)
        self._activations = f"{prefix}.activations."
        self._entries: list[Entry] = []
        self._reader = GenerationsReader()
        self._tokens: dict[tuple[int, int, int], _Tokens] = {}
        self._tables: dict[tuple[str, int], StreamTable] = {}
        self._rows: dict[tuple[str, int, int, int], _Rows] = {}

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self._entries)

    @property
    def entries(self) -> list[Entry]:
        """The entries by time; at one moment in the order of the ring: prompt, run, activations, verdict, command."""
        return sorted(self._entries, key=lambda entry: (entry.at_ms, _ORDER.get(entry.what, 9)))

    @property
    def outcome(self) -> str:
        """How the request ended, in a word; `open` where it has not."""
        state = self._reader.get(self.request_id)
        if state is None:
            return "waiting" if any(entry.what == "prompt" for entry in self._entries) else "unknown"
        if not state.closed:
            return "released" if state.released else "running"
        return ", ".join(sorted({str(final.outcome) for final in state.finals.values()}))

    def take(self, heard: Heard) -> None:
        """Take the next record of a partition: one of this request, or one that speaks of none."""
        message = heard.message
        if heard.topic.endswith(DLQ_SUFFIX) or message is None:
            if heard.key != self.request_id:
                return
            self._add(heard, *_letter(heard))
        elif heard.topic.startswith(self._activations):
            self._activation(heard)
        elif getattr(message, "request_id", None) != self.request_id:
            return
        elif isinstance(message, Accepted | Released | GenerationEvent):
            self._generation(heard, message)
        elif isinstance(message, ProbeVerdict):
            self._verdict(heard, message)
        elif isinstance(message, PromptRequest) and self._erased:
            self._add(heard, "prompt", "erased")
        else:
            self._add(heard, *said_of_message(message))

    def _add(
        self, heard: Heard, what: str, text: str, facts: dict[str, Any] | None = None, *, void: bool = False
    ) -> Entry:
        entry = Entry(
            at_ms=heard.at_ms,
            what=what,
            text=text,
            where=(heard.topic, heard.partition, heard.offset),
            void=void,
            facts=facts or {},
        )
        self._entries.append(entry)
        return entry

    # --- generations

    def _generation(self, heard: Heard, message: Accepted | Released | GenerationEvent) -> None:
        ruling = self._reader.apply(message, offset=heard.offset)
        void = ruling is Ruling.VOID
        if isinstance(message, GenerationEvent) and message.kind is GenerationKind.TOKENS:
            self._count(heard, message, void=void)
        else:
            self._add(heard, *said_of_message(message), void=void)

    def _count(self, heard: Heard, event: GenerationEvent, *, void: bool) -> None:
        key = (event.attempt, event.incarnation, event.index)
        tokens = self._tokens.get(key)
        if tokens is None or tokens.entry.void != void:
            entry = self._add(heard, "tokens", "", void=void)
            entry.facts = {"attempt": event.attempt, "index": event.index, "engine": event.engine}
            tokens = self._tokens[key] = _Tokens(entry)
        tokens.count += len(event.token_ids)
        tokens.events += 1
        entry = tokens.entry
        entry.until_ms = heard.at_ms
        entry.facts |= {"tokens": tokens.count, "events": tokens.events}
        child = f", child {event.index}" if event.index else ""
        entry.text = (
            f"{counted(tokens.count, 'token')} in {counted(tokens.events, 'event')}, attempt {event.attempt}{child}"
        )

    # --- activations

    def _activation(self, heard: Heard) -> None:
        message, point = heard.message, heard.topic.removeprefix(self._activations)
        if message is None:
            return
        mine = getattr(message, "request_id", None) == self.request_id
        if not mine and not isinstance(message, PublisherStarted):
            return
        table = self._tables.setdefault((point, heard.partition), StreamTable(point))
        events = table.observe(heard.offset, message)
        stray = next((event.cause for event in events if isinstance(event, Stray)), None)
        if stray is not None and mine:
            self._add(heard, "stray", f"{type(message).__name__} at {point}: {stray}", void=True)
        elif isinstance(message, ActivationBlock):
            self._block(heard, message, point, sum(event.gap for event in events if isinstance(event, Arrived)))
        elif isinstance(message, StreamStarted | StreamInvalidated | StreamEnded):
            self._add(heard, *said_of_message(message))
        for event in events:
            if isinstance(event, Closed) and event.stream.id.request_id == self.request_id:
                self._closed(heard, event, point)

    def _block(self, heard: Heard, block: ActivationBlock, point: str, gap: int) -> None:
        key = (point, block.attempt, block.index, block.shard)
        if gap:
            text = f"{counted(gap, 'message')} before seq {block.seq} never came, {point} attempt {block.attempt}"
            self._add(heard, "gap", text, {"point": point, "attempt": block.attempt, "missing": gap})
        rows = self._rows.get(key)
        if rows is None or gap:
            entry = self._add(heard, "activations", "")
            entry.facts = {"point": point, "attempt": block.attempt, "index": block.index, "shard": block.shard}
            entry.facts["first_position"] = int.from_bytes(block.positions[:4], "little", signed=True)
            rows = self._rows[key] = _Rows(entry)
        rows.records += 1
        rows.rows += len(block.positions) // 4
        rows.last = max(rows.last, int.from_bytes(block.positions[-4:], "little", signed=True))
        entry = rows.entry
        entry.until_ms = heard.at_ms
        entry.facts |= {"records": rows.records, "rows": rows.rows, "last_position": rows.last}
        first = entry.facts["first_position"]
        span = f"positions {first} to {rows.last}, layers {_listed(block.layers)}"
        child = f" child {block.index}" if block.index else ""
        entry.text = f"{point}{child}: {counted(rows.records, 'record')}, {span}"

    def _closed(self, heard: Heard, event: Closed, point: str) -> None:
        stream = event.stream
        if isinstance(heard.message, StreamEnded) and stream.complete:
            return  # its own end says all
        facts = {"point": point, "attempt": stream.id.attempt, "index": stream.id.index, "reason": stream.end_reason}
        missing = f", {counted(stream.missing, 'message')} never came" if stream.missing else ""
        text = f"{point} attempt {stream.id.attempt}: {stream.end_reason}, not complete{missing}"
        self._add(heard, "stream closed", text, facts)

    # --- verdicts

    def _verdict(self, heard: Heard, verdict: ProbeVerdict) -> None:
        curve = self.curves[verdict.attempt, verdict.index, verdict.point, verdict.probe]
        curve.take(verdict)
        if verdict.kind is not VerdictKind.WATERMARK:
            self._add(heard, *said_of_message(verdict))


_ORDER = {
    "prompt": 0,
    "accepted": 1,
    "stream": 2,
    "activations": 3,
    "tokens": 3,
    "gap": 3,
    "signal": 5,
    "command": 5,
    "stream end": 6,
    "stream closed": 6,
    "verdict": 7,
    "final": 8,
}


def _letter(heard: Heard) -> tuple[str, str, dict[str, Any]]:
    said = dict(heard.said or {})
    if heard.source is None:
        noted = read_note(said)
        if noted is not None:
            return "requeued", str(noted), said
        return "unreadable", f"{heard.topic}[{heard.partition}] offset {heard.offset} cannot be read", {}
    return (
        "dead letter",
        f"{heard.source}: {said.get('cause', '')}: {said.get('detail', '')}",
        {"source": list(heard.source), **said},
    )


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:6])) + (f" and {len(numbers) - 6} more" if len(numbers) > 6 else "")


def iterate(entries: list[Entry]) -> Iterator[dict[str, Any]]:
    """Yield entries as plain data."""
    for entry in entries:
        topic, partition, offset = entry.where
        yield {
            "at_ms": entry.at_ms,
            **({} if entry.until_ms is None else {"until_ms": entry.until_ms}),
            "what": entry.what,
            "text": entry.text,
            "topic": topic,
            "partition": partition,
            "offset": offset,
            **({"void": True} if entry.void else {}),
            **entry.facts,
        }
