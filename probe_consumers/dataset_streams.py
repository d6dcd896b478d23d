"""Streams of one point into rows of a dataset: the same reading of the log as a probe host has."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from probe_consumers.dataset_reading import group_of
from probe_consumers.replay import Span
from undercurrent.codec import as_array, positions, token_ids
from undercurrent.evaluation.dataset_facts import FactStore
from undercurrent.evaluation.dataset_split import SplitRule, group_hash
from undercurrent.evaluation.dataset_writer import DatasetWriter, Rows
from undercurrent.protocol.host_events import Incoming
from undercurrent.protocol.streams import (
    Arrived,
    Closed,
    Opened,
    Stray,
    Stream,
    StreamId,
    StreamMessage,
    StreamTable,
    stream_id,
)

_LISTED = 1000
_TIDY_EVERY = 1000


@dataclass(slots=True)
class _Open:
    """A stream that is being written."""

    split: str
    group: str
    positions: int = 0
    gaps: int = 0


class StreamExport:
    """Writes the streams of one point.

    Args:
        point: the extraction point.
        spans: the range, by partition.
        facts: what is known of requests; streams are added to it.
        writer: takes the rows.
        rule: how requests are split.
    """

    def __init__(
        self, point: str, spans: Mapping[int, Span], facts: FactStore, writer: DatasetWriter, rule: SplitRule
    ) -> None:
        self._point = point
        self._spans = spans
        self._facts = facts
        self._writer = writer
        self._rule = rule
        self._tables = {number: StreamTable(point) for number in spans}
        self._open: dict[tuple[int, StreamId], _Open] = {}
        self._cut: dict[StreamId, int] = {}
        self._strays: defaultdict[str, int] = defaultdict(int)
        self._kinds: dict[str, dict[str, Any]] = {}
        self._fed = 0
        self.undecodable = 0
        self.ungrouped = 0
        self.records = 0
        self.positions_without_token_ids = 0

    def feed(self, item: Incoming) -> None:
        """Take the next record of a partition."""
        self.records += 1
        if item.message is None:
            self.undecodable += 1
            return
        table = self._tables[item.partition]
        for event in table.observe(item.offset, item.message):
            if isinstance(event, Opened):
                self._opened(item.partition, event.stream)
            elif isinstance(event, Arrived):
                self._arrived(item.partition, event)
            elif isinstance(event, Closed):
                self._closed(item.partition, event.stream)
            elif isinstance(event, Stray):
                self._stray(item, event.cause)
        if self.records % _TIDY_EVERY == 0:
            # Otherwise it would remember every stream that ever came in shards.
            table.low_watermark(item.offset + 1)

    def finish(self) -> None:
        """Write down the streams that are open at the range's end."""
        for number, table in self._tables.items():
            for stream in list(table):
                self._closed(number, stream)

    @property
    def kinds(self) -> list[dict[str, Any]]:
        """What its streams are made of: one entry, unless models or engines changed."""
        return list(self._kinds.values())

    @property
    def left_out(self) -> dict[str, Any]:
        """Records that are in no row, by cause, and the requests whose start lies before the range."""
        return {
            "started_before_the_range": {
                "requests": len(self._cut),
                "records": sum(self._cut.values()),
                "named": [{**asdict(name), "records": count} for name, count in list(self._cut.items())[:_LISTED]],
            },
            "undecodable": self.undecodable,
            "strays": dict(self._strays),
        }

    def _opened(self, number: int, stream: Stream) -> None:
        name = stream.id
        if self._facts.has_stream((name.request_id, name.attempt, name.index), self._point):
            # Its rows would stand twice under one name.
            self._strays["opened_again"] += 1
            return
        prompt = self._facts.prompt(name.request_id)
        named = group_of(name.request_id, prompt, self._rule)
        self.ungrouped += named is None
        group = group_hash(name.request_id if named is None else named)
        part = self._facts.part_of(group) or self._rule.part_of(group, stream.started.started_at_us)
        self._open[number, name] = _Open(part, group)

    def _arrived(self, number: int, event: Arrived) -> None:
        name, block = event.stream.id, event.block
        opened = self._open.get((number, name))
        if opened is None:
            self._strays["opened_again"] += 1
            return
        places, tokens = positions(block), token_ids(block)
        opened.positions += len(places)
        self.positions_without_token_ids += len(places) - len(tokens)
        opened.gaps += event.gap
        key = (name.request_id, name.attempt, name.index)
        self._writer.add(
            opened.split,
            Rows(
                request_id=name.request_id,
                attempt=name.attempt,
                index=name.index,
                point=self._point,
                layers=block.layers,
                positions=places,
                token_ids=tokens,
                values=as_array(block),
                prompt_len=event.stream.started.prompt_len,
                step=block.step,
                captured_at_us=block.captured_at_us,
                gap=event.gap,
                scores=self._facts.scores(key, self._point, places, block.layers),
                row_shape=block.row_shape,
                fingerprint=event.stream.started.model_fingerprint,
            ),
        )

    def _closed(self, number: int, stream: Stream) -> None:
        opened = self._open.pop((number, stream.id), None)
        if opened is None:
            return
        started = asdict(stream.started) | {
            "shard": 0,
            "shards": 1,
            "seq": 0,
            "layers": list(stream.layers or stream.started.layers),
            "cached_prefix": max((s.started.cached_prefix for s in stream.shards.values() if s.started), default=0),
        }
        self._note_kind(started)
        ended = ended_of(stream)
        self._facts.add_stream(
            {
                **asdict(stream.id),
                "point": self._point,
                "split": opened.split,
                "group": opened.group,
                "partition": number,
                "start_offset": stream.start_offset,
                "prompt_len": stream.started.prompt_len,
                "cached_prefix": started["cached_prefix"],
                "positions": opened.positions,
                "complete": stream.complete,
                "partial": stream.partial,
                "missing": stream.missing + stream.unjoined,
                "trailing_gap": stream.missing - opened.gaps,
                "clear_up_to": stream.clear_up_to,
                "end_reason": stream.end_reason,
                "started": json.dumps(started),
                "ended": None if ended is None else json.dumps(ended),
            }
        )

    def _note_kind(self, started: Mapping[str, Any]) -> None:
        names = ("tensor_type", "layers", "width", "row_shape", "dtype", "model", "model_fingerprint", "lora")
        kind = {name: started[name] for name in names}
        self._kinds.setdefault(json.dumps(kind), kind)

    def _stray(self, item: Incoming, cause: str) -> None:
        # At the very start of a partition nothing lies before: there it is no cut.
        if (
            cause == "no_open_stream"
            and self._spans[item.partition].start > 0
            and isinstance(item.message, StreamMessage)
        ):
            name = stream_id(item.message)
            if name in self._cut or not self._facts.has_stream(
                (name.request_id, name.attempt, name.index), self._point
            ):
                self._cut[name] = self._cut.get(name, 0) + 1
                return
        self._strays[cause] += 1


def ended_of(stream: Stream) -> dict[str, Any] | None:
    """Return the ends of a stream's shards as one, None where one has none."""
    if not stream.all_ended:
        return None
    ends = [shard.ended for _, shard in sorted(stream.shards.items()) if shard.ended is not None]
    # Not strict: of a record that its writer has not filled in, the rest is exported.
    emitted = {layer: count for end in ends for layer, count in zip(end.layers, end.emitted, strict=False)}
    dropped = {layer: count for end in ends for layer, count in zip(end.layers, end.dropped, strict=False)}
    first = next((end for end in ends if end.reason != "finished"), ends[0])
    return {
        "last_pos": max(end.last_pos for end in ends),
        "layers": sorted(emitted),
        "emitted": [emitted[layer] for layer in sorted(emitted)],
        "dropped": [dropped.get(layer, 0) for layer in sorted(emitted)],
        "reason": first.reason.value,
        "detail": first.detail,
        "ended_at_us": max(end.ended_at_us for end in ends),
    }
