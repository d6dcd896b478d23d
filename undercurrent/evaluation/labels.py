"""Labels: rows that say what a request is. They may come days later, and from several sources."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as pq
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from undercurrent.errors import ConfigError, DatasetError
from undercurrent.protocol.labels import label_key
from undercurrent.protocol.messages import Label, LabelSpan, LabelValue
from undercurrent.topics import MAX_REQUEST_ID_BYTES

_LAST_POSITION = 2**31 - 1
_YEARS = range(1970, 9999)
_SUFFIXES = (".jsonl", ".csv", ".parquet")

_Word = Annotated[str, Field(min_length=1, pattern=r"^[^|]+$")]


class LabelRow(BaseModel):
    """One row of a file of labels.

    Args:
        request_id: the request.
        name: what is judged, without a `|`.
        value: positive, negative or unknown.
        token_start: absolute position of the first token that it holds for; without it, the whole request.
        token_end: position after the last one.
        char_start: instead of tokens: first character of the generated text.
        char_end: character after the last one.
        source: who says so, without a `|`.
        version: of the source or its guideline.
        sampling_probability: chance, in (0, 1], that the request was drawn to be labelled.
        created_at: when it was said, with a time zone; now by default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    request_id: Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID_BYTES)]
    name: _Word
    value: LabelValue
    token_start: Annotated[int, Field(ge=0, le=_LAST_POSITION)] | None = None
    token_end: Annotated[int, Field(ge=1, le=_LAST_POSITION)] | None = None
    char_start: Annotated[int, Field(ge=0)] | None = None
    char_end: Annotated[int, Field(ge=1)] | None = None
    source: _Word
    version: str = ""
    sampling_probability: Annotated[float, Field(gt=0, le=1)] | None = None
    created_at: AwareDatetime | None = None

    @model_validator(mode="after")
    def _spans_are_whole(self) -> LabelRow:
        for unit in ("token", "char"):
            start, end = getattr(self, f"{unit}_start"), getattr(self, f"{unit}_end")
            if (start is None) != (end is None) or (start is not None and start >= end):
                raise ValueError(f"{unit}_start {start}, {unit}_end {end}: expected both, the first below the second")
        if self.token_start is not None and self.char_start is not None:
            raise ValueError("token_start and char_start: expected one of the two spans")
        if self.created_at is not None and self.created_at.year not in _YEARS:
            raise ValueError(f"created_at {self.created_at.isoformat()}: expected a year from 1970 to 9998")
        return self

    @property
    def chars(self) -> tuple[int, int] | None:
        """Its span of the generated text, None where it has none."""
        return None if self.char_start is None or self.char_end is None else (self.char_start, self.char_end)

    @property
    def spanned(self) -> bool:
        """Whether it holds for a part of the request only."""
        return self.token_start is not None or self.char_start is not None

    def says_as(self, other: LabelRow) -> bool:
        """Tell whether another row of its key says the same of another span."""
        return self.spanned and other.spanned and self._judgement == other._judgement

    @property
    def _judgement(self) -> tuple[object, ...]:
        return self.value, self.version, self.sampling_probability, self.created_at

    def label(self, now: datetime, tokens: tuple[int, int] | None = None) -> Label:
        """Return it as a message.

        Args:
            now: its time where the row has none.
            tokens: absolute positions of its span of text.
        """
        start, end = tokens if tokens is not None else (self.token_start, self.token_end)
        return Label(
            request_id=self.request_id,
            name=self.name,
            value=self.value,
            token_start=start,
            token_end=end,
            source=self.source,
            version=self.version,
            sampling_probability=self.sampling_probability,
            created_at_us=int((self.created_at or now).astimezone(UTC).timestamp() * 1_000_000),
        )


def key_of(label: Label | LabelRow) -> bytes:
    """Return a label's key on its topic."""
    return label_key(label.request_id, label.name, label.source).encode()


def joined(labels: Iterable[Label]) -> list[Label]:
    """Return one label for each key, with the spans of all that have it; spans that meet become one.

    Args:
        labels: those of one key say the same, each of its own span.
    """
    by_key: dict[bytes, list[Label]] = {}
    for label in labels:
        by_key.setdefault(key_of(label), []).append(label)
    return [_with_spans(same) if len(same) > 1 else same[0] for same in by_key.values()]


def _with_spans(same: Sequence[Label]) -> Label:
    spans: list[tuple[int, int]] = []
    for start, end in sorted(span for label in same for span in label.spans):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    (start, end), *others = spans
    further = tuple(LabelSpan(token_start=first, token_end=last) for first, last in others)
    return replace(same[0], token_start=start, token_end=end, further_spans=further)


def parse_row(fields: Mapping[str, Any], where: str) -> LabelRow:
    """Return a row, checked.

    Args:
        fields: by name; those that are None or empty text count as absent.
        where: names it in errors.

    Raises:
        DatasetError: naming the field and what would be right.
    """
    given = {name: value for name, value in fields.items() if value is not None and value != ""}
    try:
        return LabelRow.model_validate(given)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise DatasetError(f"{where}: {f'field {field!r}: ' if field else ''}{first['msg']}") from exc


def read_labels(path: Path, defaults: Mapping[str, str | None] | None = None) -> Iterator[LabelRow]:
    """Yield the rows of a file of labels.

    Args:
        path: `.jsonl`, `.csv` (with a header) or `.parquet`.
        defaults: values of fields that a row does not have, for example name and source.

    Raises:
        DatasetError: naming the file, the record and the field; or two rows have one key and do not say the same of
            two spans.
    """
    seen: dict[bytes, tuple[int, LabelRow]] = {}
    for number, fields in _records(path):
        where = f"{path}: record {number}"
        given = {name: value for name, value in fields.items() if value is not None and value != ""}
        row = parse_row({**(defaults or {}), **given}, where)
        first, earlier = seen.setdefault(key_of(row), (number, row))
        if first != number and not row.says_as(earlier):
            raise DatasetError(
                f"{where}: request {row.request_id!r}, name {row.name!r} and source {row.source!r} are those of record "
                f"{first}, and only one judgement of a source counts; rows that differ in nothing but their span "
                f"are one label"
            )
        yield row


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if path.suffix not in _SUFFIXES:
        raise DatasetError(f"{path}: expected a file that ends in {', '.join(_SUFFIXES)}")
    try:
        if path.suffix == ".parquet":
            batches = pq.ParquetFile(path).iter_batches()
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
            return
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, filter(str.strip, file))
            for number, fields in enumerate(rows, start=1):
                if not isinstance(fields, Mapping):
                    raise DatasetError(f"{path}: record {number}: expected an object")
                if None in fields:
                    raise DatasetError(f"{path}: record {number}: has more cells than the header")
                yield number, fields
    except (OSError, ValueError, csv.Error) as exc:
        raise DatasetError(f"{path}: cannot be read: {exc}") from exc


def parse_span(text: str | None, unit: str) -> dict[str, int]:
    """Return `{unit}_start` and `{unit}_end` of a text such as `12:30`; nothing where there is none.

    Raises:
        ConfigError: it has not two numbers.
    """
    if text is None:
        return {}
    try:
        start, end = (int(part) for part in text.split(":"))
    except ValueError as exc:
        raise ConfigError(f"--{unit}s {text!r}: expected START:END, as 12:30") from exc
    return {f"{unit}_start": start, f"{unit}_end": end}
