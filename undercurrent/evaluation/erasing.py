"""Requests taken out of a folder: of a dataset, of a replay's results, of anything made of their tables.

Rows of Parquet tables that have their ids go, the values of their rows in files of tensors become zeros, and JSON files
lose every entry that is such an id. Everything else that names one is reported, and left to whoever asked. It may be
repeated, and has to be when it was interrupted: until then a dataset's sums do not hold, and it is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from undercurrent.errors import DatasetError
from undercurrent.evaluation.dataset_format import (
    LABEL_PREFIX,
    LABELS,
    MANIFEST,
    README,
    REQUESTS,
    STREAMS,
    file_facts,
    read_manifest,
    read_table,
    readme,
    tensor_file,
    tensor_key,
    write_manifest,
)
from undercurrent.evaluation.dataset_tensors import TensorFile
from undercurrent.files import replacing, write_text, writing
from undercurrent.protocol.erasures import digest

_ID = "request_id"
_GONE = object()
_CHUNK = 1 << 20


@dataclass(slots=True)
class ErasedFolder:
    """What became of a folder.

    Args:
        rows: that were taken out of tables, by file.
        tensor_rows: whose values are zeros now.
        left: files that still name a request; to be deleted by hand.
    """

    rows: dict[str, int] = field(default_factory=dict)
    tensor_rows: int = 0
    left: list[str] = field(default_factory=list)


def check_erasable(folder: Path) -> None:
    """Refuse a folder that holds nothing in which a request could be found.

    Raises:
        DatasetError: it is no folder, or has no table.
    """
    if not folder.is_dir():
        raise DatasetError(f"{folder}: there is no such folder")
    if next(folder.rglob("*.parquet"), None) is None:
        raise DatasetError(f"{folder}: holds no table of requests; accepted: a dataset, results of a replay, a report")


def requests_in(folder: Path) -> frozenset[str]:
    """Return the ids of all requests in the tables of a folder.

    Raises:
        DatasetError: it is no folder with tables, or one is damaged.
    """
    check_erasable(folder)
    tables = (path for path in folder.rglob("*.parquet") if _ID in _columns(path))
    return frozenset(name for path in tables for name in read_table(path, [_ID])[_ID].unique().to_pylist() if name)


def erase_from_folder(folder: Path, *request_ids: str) -> ErasedFolder:
    """Take requests out of a folder.

    Raises:
        DatasetError: it is no folder with tables, or a file in it is damaged.
        OSError: with the name of a file that cannot be written.
    """
    check_erasable(folder)
    result, gone = ErasedFolder(), frozenset(request_ids)
    manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
    tables = sorted(folder.rglob("*.parquet"))
    if manifest is not None:
        # Before the rows that say where they are.
        result.tensor_rows = sum(_zero(folder, path, gone) for path in tables if path.parent.name == "data")
    for path in sorted(folder.rglob("*.json")):
        _without_entries(path, gone)
    # The requests last: as long as they name one, an erasure that was interrupted is not over.
    for path in sorted(tables, key=lambda path: path.name == REQUESTS):
        if count := _without_rows(path, gone):
            result.rows[path.relative_to(folder).as_posix()] = count
    if manifest is not None:
        _describe(folder, gone)
    result.left = [path.relative_to(folder).as_posix() for path in _naming(folder, gone)]
    return result


def _zero(folder: Path, table: Path, gone: frozenset[str]) -> int:
    """Overwrite the values of requests' rows; return how many rows."""
    rows = read_table(table, [_ID, "point", "layer", "shard", "row"])
    mine = rows.filter(_of(rows, gone)).to_pydict()
    part = table.stem.rpartition("-")[0]
    for point, layer, shard, row in zip(mine["point"], mine["layer"], mine["shard"], mine["row"], strict=True):
        path = folder / tensor_file(part, shard)
        values = TensorFile(path).map(tensor_key(point, layer))
        if not isinstance(values, np.memmap):
            continue
        with writing(path), path.open("r+b") as file:
            file.seek(values.offset + row * values.strides[0])
            file.write(bytes(values.strides[0]))
    return len(mine["row"])


def _columns(path: Path) -> list[str]:
    """Return the names of a table's columns."""
    try:
        return list(pq.read_schema(path).names)
    except (OSError, pa.ArrowException) as exc:
        raise DatasetError(f"{path}: cannot be read: {exc}") from exc


def _of(table: pa.Table, gone: frozenset[str]) -> pa.ChunkedArray:
    """Return of each row whether it is of one of some requests."""
    return pc.is_in(table[_ID], pa.array(sorted(gone), pa.string()))


def _without_rows(path: Path, gone: frozenset[str]) -> int:
    """Take requests' rows out of a table; return how many there were."""
    if _ID not in _columns(path):
        return 0
    table = read_table(path)
    kept = table.filter(pc.invert(_of(table, gone)))
    if kept.num_rows == table.num_rows:
        return 0
    with replacing(path) as fresh, writing(fresh):
        pq.write_table(kept, fresh, compression="zstd")
    return int(table.num_rows - kept.num_rows)


def _without_entries(path: Path, gone: frozenset[str]) -> None:
    """Take requests' ids out of a JSON file, wherever they stand alone."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if not any(name in text or json.dumps(name)[1:-1] in text for name in gone):
        return
    try:
        data = json.loads(text)
    except ValueError:
        return  # it is among those that are left
    kept = _scrubbed(data, gone)
    if kept is _GONE:
        path.unlink()  # it was about nothing else
        return
    write_text(path, json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def _scrubbed(data: Any, gone: frozenset[str]) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(data, dict):
        if isinstance(name := data.get(_ID), str) and name in gone:
            return _GONE
        kept = {key: _scrubbed(value, gone) for key, value in data.items() if key not in gone}
        return {key: None if value is _GONE else value for key, value in kept.items()}
    if isinstance(data, list):
        return [kept for item in data if (kept := _scrubbed(item, gone)) is not _GONE]
    return _GONE if isinstance(data, str) and data in gone else data


def _describe(folder: Path, gone: frozenset[str]) -> None:
    """Write the manifest and the README of a dataset anew."""
    manifest = read_manifest(folder)
    manifest["counts"] |= _counts(folder, manifest["counts"])
    manifest["erased"] = sorted({*manifest.get("erased", ()), *map(digest, gone)})
    tables = sorted(path.relative_to(folder).as_posix() for path in folder.glob("data/*.parquet"))
    write_text(folder / README, readme(manifest, tables))
    manifest["files"] = file_facts(folder)
    write_manifest(folder, manifest)


def _counts(folder: Path, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return how much a dataset holds now."""
    requests = read_table(folder / REQUESTS)
    splits = requests["split"].to_pylist()
    rows = {part: _rows_of(folder, part) for part in before["rows_by_split"]}
    return {
        "requests": requests.num_rows,
        "void_requests": sum(map(bool, requests["void"].to_pylist())),
        "streams": read_table(folder / STREAMS, [_ID]).num_rows,
        "labels": read_table(folder / LABELS, [_ID]).num_rows,
        "requests_by_split": {part: splits.count(part) for part in before["requests_by_split"]},
        "requests_by_label": {
            name: dict(Counter(requests[LABEL_PREFIX + name].to_pylist())) for name in before["requests_by_label"]
        },
        "rows": sum(rows.values()),
        "rows_by_split": rows,
    }


def _rows_of(folder: Path, part: str) -> int:
    return sum(pq.read_metadata(path).num_rows for path in folder.glob(f"data/{part}-*.parquet"))


def _naming(folder: Path, gone: frozenset[str]) -> Iterator[Path]:
    """Yield the files that still name a request, but for tables, whose rows are gone."""
    names = sorted((name.encode() for name in gone), key=len, reverse=True)
    wanted = re.compile(rb"(?<![\w.-])(?:" + b"|".join(map(re.escape, names)) + rb")(?![\w-])")
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".parquet" and _ID in _columns(path):
            continue
        if path.is_file() and _holds(path, wanted, len(names[0])):
            yield path


def _holds(path: Path, wanted: re.Pattern[bytes], size: int) -> bool:
    before = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if wanted.search(before + chunk):
                return True
            before = chunk[-size - 2 :]
    return False
