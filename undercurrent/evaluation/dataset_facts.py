"""What other topics say of the requests of a dataset, kept on disk until the end: prompts, finals, scores and labels.

An export reads a topic once and keeps nothing of it in memory; what belongs together comes from four topics in any
order. So facts go into a SQLite file beside the dataset, which is deleted when the tables are written.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.evaluation.dataset_format import LABEL_SCHEMA, STREAM_SCHEMA
from undercurrent.protocol.messages import GenerationEvent, Label, ProbeVerdict, PromptRequest

_STREAM_FIELDS = tuple(STREAM_SCHEMA.names)
_LABEL_FIELDS = tuple(LABEL_SCHEMA.names)
_TABLES = f"""
CREATE TABLE prompts (request_id TEXT PRIMARY KEY, prompt TEXT, metadata TEXT, tenant TEXT, created_at_us INTEGER,
    grp TEXT, drawn TEXT, exact INTEGER, near INTEGER);
CREATE TABLE groups (grp TEXT PRIMARY KEY, latest_us INTEGER, part TEXT);
CREATE TABLE finals (request_id TEXT, child INTEGER, attempt INTEGER, text TEXT, generated_tokens INTEGER,
    outcome TEXT, finish_reason TEXT, aborted_by TEXT, aborted_at INTEGER, holdout INTEGER, holdout_share REAL,
    PRIMARY KEY (request_id, child));
CREATE TABLE scores (request_id TEXT, attempt INTEGER, child INTEGER, point TEXT, probe TEXT, first INTEGER,
    last INTEGER, layers TEXT, positions BLOB, scores BLOB);
CREATE INDEX scores_of ON scores (request_id, attempt, child, point, probe);
CREATE TABLE labels ({", ".join(f'"{name}"' for name in _LABEL_FIELDS)},
    PRIMARY KEY (request_id, name, source, token_start));
CREATE TABLE streams ({", ".join(f'"{name}"' for name in _STREAM_FIELDS)});
CREATE INDEX streams_of ON streams (request_id, attempt, "index");
"""


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What the prompts topic says of a request; empty where it says nothing."""

    prompt: str | None = None
    metadata: Mapping[str, str] | None = None
    tenant: str | None = None
    created_at_us: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands in the split.

    Args:
        drawn: the part that its group's hash drew.
        part: the part that it is in.
        exact: code of its prompt; equal ones have one.
        near: code of the prompts that share a passage.
    """

    drawn: str
    part: str
    exact: int
    near: int


class FactStore:
    """Facts of requests, on disk.

    Args:
        path: of the SQLite file; it must not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = sqlite3.connect(path)
        # Nothing of it outlives the export.
        self._db.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-65536;" + _TABLES)
        self._probes: dict[str, set[str]] = {}

    def close(self) -> None:
        """Delete the file."""
        self._db.close()
        self._path.unlink(missing_ok=True)

    # --- in

    def add_prompt(self, prompt: PromptRequest, group: str) -> None:
        """Take a prompt and the hash of its group; of several with one id the first counts, as for the engine."""
        self._db.execute(
            "INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?, ?, ?, NULL, NULL, NULL)",
            (
                prompt.request_id,
                prompt.prompt,
                json.dumps(dict(prompt.metadata), ensure_ascii=False),
                prompt.tenant,
                prompt.created_at_us,
                group,
            ),
        )
        at_us = prompt.created_at_us
        self._db.execute(
            "INSERT INTO groups VALUES (?, ?, NULL) ON CONFLICT (grp) DO UPDATE SET latest_us = max(latest_us, ?)",
            (group, at_us, at_us),
        )

    def add_places(self, places: Iterable[Place]) -> None:
        """Take what is said of all prompts, in the order of `groups`."""
        self._db.executemany(
            "UPDATE prompts SET drawn = ?, exact = ?, near = ? WHERE rowid = ?",
            ((place.drawn, place.exact, place.near, row) for row, place in enumerate(places, 1)),
        )

    def add_parts(self, parts: Mapping[str, str]) -> None:
        """Take the part of each group, by its hash."""
        self._db.executemany("UPDATE groups SET part = ? WHERE grp = ?", ((part, name) for name, part in parts.items()))

    def add_final(self, final: GenerationEvent, text: str) -> None:
        """Take the valid final of a child and all of its text."""
        cause, held = final.abort, final.holdout
        self._db.execute(
            "INSERT OR IGNORE INTO finals VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                final.request_id,
                final.index,
                final.attempt,
                text,
                final.generated_tokens,
                final.outcome,
                final.finish_reason,
                None if cause is None else cause.probe or cause.source.value,
                None if cause is None else cause.token_pos,
                None if held is None else held.held,
                None if held is None else held.share,
            ),
        )

    def add_scores(self, verdict: ProbeVerdict) -> None:
        """Take the scores of a verdict."""
        positions = np.frombuffer(verdict.score_positions, "<i4")
        if not len(positions):
            return
        self._probes.setdefault(verdict.point, set()).add(verdict.probe)
        self._db.execute(
            "INSERT INTO scores VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                verdict.request_id,
                verdict.attempt,
                verdict.index,
                verdict.point,
                verdict.probe,
                int(positions.min()),
                int(positions.max()),
                json.dumps(verdict.score_layers),
                verdict.score_positions,
                verdict.scores,
            ),
        )

    def add_label(self, label: Label) -> None:
        """Take a label, a row per span; it replaces the one that its source gave before."""
        self.drop_label(label.request_id, label.name, label.source)
        marks = ", ".join("?" * len(_LABEL_FIELDS))
        for start, end in label.spans or ((None, None),):
            fields = {name: getattr(label, name) for name in _LABEL_FIELDS} | {"token_start": start, "token_end": end}
            self._db.execute(f"INSERT INTO labels VALUES ({marks})", tuple(fields.values()))  # noqa: S608 - our own names

    def drop_label(self, request_id: str, name: str, source: str) -> None:
        """Forget a label that was taken back."""
        self._db.execute(
            "DELETE FROM labels WHERE request_id = ? AND name = ? AND source = ?", (request_id, name, source)
        )

    def add_stream(self, stream: Mapping[str, Any]) -> None:
        """Take a stream: values of `STREAM_SCHEMA` by name."""
        marks = ", ".join("?" * len(_STREAM_FIELDS))
        values = [stream[name] for name in _STREAM_FIELDS]
        self._db.execute(f"INSERT INTO streams VALUES ({marks})", values)  # noqa: S608 - our own names

    # --- out

    @property
    def probes(self) -> tuple[str, ...]:
        """Names of the probes that scored anything, in order."""
        return tuple(sorted({name for names in self._probes.values() for name in names}))

    def is_closed(self, request_id: str) -> bool:
        """Whether a request has a valid final."""
        found = self._db.execute("SELECT 1 FROM finals WHERE request_id = ?", (request_id,)).fetchone()
        return found is not None

    def has_stream(self, stream: tuple[str, int, int], point: str) -> bool:
        """Whether a stream of that name has been added."""
        found = self._db.execute(
            'SELECT 1 FROM streams WHERE request_id = ? AND attempt = ? AND "index" = ? AND point = ?', (*stream, point)
        ).fetchone()
        return found is not None

    def prompt(self, request_id: str) -> PromptFacts:
        """Return what is known of a request's prompt."""
        found = self._db.execute(
            "SELECT prompt, metadata, tenant, created_at_us FROM prompts WHERE request_id = ?", (request_id,)
        ).fetchone()
        return PromptFacts() if found is None else PromptFacts(found[0], json.loads(found[1]), found[2], found[3])

    def groups(self) -> list[tuple[str, int]]:
        """Return of each prompt the hash of its group and when that group's latest request was made."""
        return self._db.execute(
            "SELECT grp, latest_us FROM prompts JOIN groups USING (grp) ORDER BY prompts.rowid"
        ).fetchall()

    def texts(self) -> Iterator[str | None]:
        """Yield the text of each prompt, in the order of `groups`."""
        return (text for (text,) in self._db.execute("SELECT prompt FROM prompts ORDER BY rowid"))

    def part_of(self, group: str) -> str | None:
        """Return the part of a group, None where no prompt of it is known."""
        found = self._db.execute("SELECT part FROM groups WHERE grp = ?", (group,)).fetchone()
        return None if found is None else found[0]

    def places(self) -> list[Place]:
        """Return what was said of the prompts of those requests that have a stream."""
        found = self._db.execute(
            "SELECT drawn, part, exact, near FROM prompts JOIN groups USING (grp) "
            "WHERE request_id IN (SELECT request_id FROM streams)"
        )
        return [Place(*row) for row in found]

    def scores(
        self,
        stream: tuple[str, int, int],
        point: str,
        positions: NDArray[np.int32],
        layers: tuple[int, ...],
    ) -> dict[str, NDArray[np.float32]]:
        """Return the scores that probes gave some rows, float32 [n, layers] by probe; NaN where they gave none."""
        found: dict[str, NDArray[np.float32]] = {}
        if point not in self._probes:
            return found
        asked = self._db.execute(
            "SELECT probe, layers, positions, scores FROM scores WHERE request_id = ? AND attempt = ? AND child = ? "
            "AND point = ? AND last >= ? AND first <= ?",
            (*stream, point, int(positions.min()), int(positions.max())),
        )
        for probe, named, places, values in asked:
            mine = json.loads(named)
            table = found.setdefault(probe, np.full((len(positions), len(layers)), np.nan, np.float32))
            told = np.frombuffer(places, "<i4")
            given = np.frombuffer(values, "<f4").reshape(len(told), len(mine))
            _, here, there = np.intersect1d(positions, told, return_indices=True)
            for column, layer in enumerate(mine):
                if layer in layers:
                    table[here, layers.index(layer)] = given[there, column]
        return found

    def label_names(self) -> list[str]:
        """Return the names of all labels of requests that have a stream, in order."""
        found = self._db.execute(
            "SELECT DISTINCT name FROM labels WHERE request_id IN (SELECT request_id FROM streams) ORDER BY name"
        )
        return [name for (name,) in found]

    def labels(self) -> Iterator[dict[str, Any]]:
        """Yield the labels of requests that have a stream, by request and name."""
        return self._rows(
            "SELECT * FROM labels WHERE request_id IN (SELECT request_id FROM streams) "
            "ORDER BY request_id, name, source, token_start"
        )

    def labels_of(self, request_id: str) -> list[tuple[str, str]]:
        """Return name and value of every label of a request."""
        return self._db.execute(
            "SELECT name, min(value) FROM labels WHERE request_id = ? GROUP BY name, source", (request_id,)
        ).fetchall()

    def streams(self) -> Iterator[dict[str, Any]]:
        """Yield the streams, in the order in which they were added."""
        return self._streams("SELECT * FROM streams ORDER BY rowid")

    def children(self) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any], bool]]:
        """Yield, per request, attempt and child: its streams, its final (or nothing), whether a later attempt ran."""
        heads = self._db.execute(
            'SELECT request_id, attempt, "index", min(rowid) AS at FROM streams GROUP BY 1, 2, 3 ORDER BY at'
        )
        for request_id, attempt, child, _ in heads:
            streams = list(
                self._streams(
                    'SELECT * FROM streams WHERE request_id = ? AND attempt = ? AND "index" = ? ORDER BY rowid',
                    (request_id, attempt, child),
                )
            )
            final = next(self._rows("SELECT * FROM finals WHERE request_id = ? AND child = ?", (request_id, child)), {})
            later = self._db.execute(
                "SELECT 1 FROM streams WHERE request_id = ? AND attempt > ?", (request_id, attempt)
            ).fetchone()
            yield streams, final, later is not None

    def _streams(self, query: str, values: Iterable[Any] = ()) -> Iterator[dict[str, Any]]:
        for row in self._rows(query, values):
            # SQLite has no truth values.
            yield row | {"complete": bool(row["complete"]), "partial": bool(row["partial"])}

    def _rows(self, query: str, values: Iterable[Any] = ()) -> Iterator[dict[str, Any]]:
        cursor = self._db.execute(query, tuple(values))
        names = [column[0] for column in cursor.description]
        for row in cursor:
            yield dict(zip(names, row, strict=True))
