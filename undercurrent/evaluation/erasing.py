"""A request taken out of a folder: of a dataset, of a replay's results, of anything made of their tables.

Rows of Parquet tables that have its id go, the values of its rows in files of tensors become zeros, and JSON files lose
every entry that is its id. Everything else that names it is reported, and left to whoever asked. It may be repeated,
and has to be when it was interrupted: until then a dataset's sums do not hold, and it is refused.
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
        left: files that still name the request; to be deleted by hand.
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


def erase_from_folder(folder: Path, request_id: str) -> ErasedFolder:
    """Take a request out of a folder.

    Raises:
        DatasetError: it is no folder with tables, or a file in it is damaged.
    """
    check_erasable(folder)
    result = ErasedFolder()
    manifest = read_manifest(folder) if (folder / MANIFEST).exists() else None
    tables = sorted(folder.rglob("*.parquet"))
    if manifest is not None:
        # Before the rows that say where they are.
        result.tensor_rows = sum(_zero(folder, path, request_id) for path in tables if path.parent.name == "data")
    for path in tables:
        if count := _without_rows(path, request_id):
            result.rows[path.relative_to(folder).as_posix()] = count
    for path in sorted(folder.rglob("*.json")):
        _without_entries(path, request_id)
    if manifest is not None:
        _describe(folder, request_id)
    result.left = [path.relative_to(folder).as_posix() for path in _naming(folder, request_id)]
    return result


def _zero(folder: Path, table: Path, request_id: str) -> int:
    """Overwrite the values of a request's rows; return how many rows."""
    rows = read_table(table, [_ID, "point", "layer", "shard", "row"])
    mine = rows.filter(pc.equal(rows[_ID], request_id)).to_pydict()
    part = table.stem.rpartition("-")[0]
    for point, layer, shard, row in zip(mine["point"], mine["layer"], mine["shard"], mine["row"], strict=True):
        path = folder / tensor_file(part, shard)
        values = TensorFile(path).map(tensor_key(point, layer))
        if not isinstance(values, np.memmap):
            continue
        with path.open("r+b") as file:
            file.seek(values.offset + row * values.strides[0])
            file.write(bytes(values.strides[0]))
    return len(mine["row"])


def _without_rows(path: Path, request_id: str) -> int:
    """Take a request's rows out of a table; return how many there were."""
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as exc:
        raise DatasetError(f"{path}: cannot be read: {exc}") from exc
    if _ID not in schema.names:
        return 0
    table = read_table(path)
    kept = table.filter(pc.not_equal(table[_ID], request_id))
    if kept.num_rows == table.num_rows:
        return 0
    fresh = path.with_name(path.name + ".new")
    pq.write_table(kept, fresh, compression="zstd")
    fresh.replace(path)
    return int(table.num_rows - kept.num_rows)


def _without_entries(path: Path, request_id: str) -> None:
    """Take a request's id out of a JSON file, wherever it stands alone."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if request_id not in text and json.dumps(request_id)[1:-1] not in text:
        return
    try:
        data = json.loads(text)
    except ValueError:
        return  # it is among those that are left
    kept = _scrubbed(data, request_id)
    if kept is _GONE:
        path.unlink()  # it was about nothing else
        return
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    fresh.replace(path)


def _scrubbed(data: Any, request_id: str) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(data, dict):
        if data.get(_ID) == request_id:
            return _GONE
        kept = {key: _scrubbed(value, request_id) for key, value in data.items() if key != request_id}
        return {key: None if value is _GONE else value for key, value in kept.items()}
    if isinstance(data, list):
        return [kept for item in data if (kept := _scrubbed(item, request_id)) is not _GONE]
    return _GONE if data == request_id else data


def _describe(folder: Path, request_id: str) -> None:
    """Write the manifest and the README of a dataset anew."""
    manifest = read_manifest(folder)
    manifest["counts"] |= _counts(folder, manifest["counts"])
    manifest["erased"] = sorted({*manifest.get("erased", ()), digest(request_id)})
    tables = sorted(path.relative_to(folder).as_posix() for path in folder.glob("data/*.parquet"))
    (folder / README).write_text(readme(manifest, tables), encoding="utf-8")
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


def _naming(folder: Path, request_id: str) -> Iterator[Path]:
    """Yield the files that still name a request, but for tables, whose rows are gone."""
    wanted = re.compile(rb"(?<![\w.-])" + re.escape(request_id.encode()) + rb"(?![\w-])")
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".parquet" and _ID in pq.read_schema(path).names:
            continue
        if path.is_file() and _holds(path, wanted, len(request_id.encode())):
            yield path


def _holds(path: Path, wanted: re.Pattern[bytes], size: int) -> bool:
    before = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if wanted.search(before + chunk):
                return True
            before = chunk[-size - 2 :]
    return False
