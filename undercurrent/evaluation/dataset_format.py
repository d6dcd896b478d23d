"""The folder of a dataset: its files, their columns, and what describes them.

    DIR/
      README.md                      a header that `datasets.load_dataset(DIR, "requests")` reads
      manifest.json                  written last: a folder without one was not finished
      requests.parquet               a row per (request, attempt, child)
      streams.parquet                a row per (request, attempt, child, point): how its capture began and ended
      labels.parquet                 a row per label and span
      data/{part}-00000.parquet      a row per (token, layer)
      tensors/{part}-00000.safetensors   key {point}.{layer}: [rows, width]

`shard` and `row` of a token's row say where its tensor is: row `row` of `{point}.{layer}` in the file of the same part
with that number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from undercurrent.counts import counted
from undercurrent.errors import DatasetError
from undercurrent.evaluation.dataset_split import PARTS
from undercurrent.files import write_text

FORMAT = "undercurrent-dataset"
VERSION = 1
LAYER_CONVENTION = "layer is 0-based and means that decoder block's output; token_pos is absolute over prompt plus text"
MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"
"""Lies in the folder for as long as an export writes it."""
README = "README.md"
REQUESTS, STREAMS, LABELS = "requests.parquet", "streams.parquet", "labels.parquet"
SCORE_PREFIX, LABEL_PREFIX = "score.", "label."

TOKEN_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("attempt", pa.int64()),
        ("index", pa.int32()),
        ("point", pa.string()),
        ("token_pos", pa.int32()),
        ("is_generated", pa.bool_()),
        ("token_id", pa.int32()),
        ("layer", pa.int32()),
        ("shard", pa.int32()),
        ("row", pa.int64()),
        ("step", pa.int64()),
        ("captured_at_us", pa.int64()),
        ("gap", pa.int64()),
    ]
)
"""`gap`: messages of the stream that never came, directly before this row. Scores of probes follow, `score.{probe}`."""

STREAM_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("attempt", pa.int64()),
        ("index", pa.int32()),
        ("point", pa.string()),
        ("split", pa.string()),
        ("group", pa.string()),
        ("partition", pa.int32()),
        ("start_offset", pa.int64()),
        ("prompt_len", pa.int32()),
        ("cached_prefix", pa.int32()),
        ("positions", pa.int64()),
        ("complete", pa.bool_()),
        ("partial", pa.bool_()),
        ("missing", pa.int64()),
        ("trailing_gap", pa.int64()),
        ("clear_up_to", pa.int64()),
        ("end_reason", pa.string()),
        ("started", pa.string()),
        ("ended", pa.string()),
    ]
)
"""How each capture went.

`end_reason` is empty for a stream that was open at the range's end, `trailing_gap` counts the messages that never came
after the last row, `clear_up_to` is the last position before anything doubtful; `started` and `ended` are JSON.
"""

REQUEST_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("attempt", pa.int64()),
        ("index", pa.int32()),
        ("split", pa.string()),
        ("group", pa.string()),
        ("void", pa.bool_()),
        ("prompt", pa.string()),
        ("text", pa.string()),
        ("metadata", pa.string()),
        ("tenant", pa.string()),
        ("created_at_us", pa.int64()),
        ("started_at_us", pa.int64()),
        ("prompt_len", pa.int32()),
        ("cached_prefix", pa.int32()),
        ("positions", pa.int64()),
        ("generated_tokens", pa.int32()),
        ("outcome", pa.string()),
        ("finish_reason", pa.string()),
        ("aborted_by", pa.string()),
        ("aborted_at", pa.int32()),
        ("holdout", pa.bool_()),
        ("holdout_share", pa.float64()),
        ("complete", pa.bool_()),
        ("partial", pa.bool_()),
        ("missing", pa.int64()),
        ("end_reason", pa.string()),
        ("model", pa.string()),
        ("model_fingerprint", pa.string()),
        ("lora", pa.string()),
        ("quantization", pa.string()),
    ]
)
"""Requests.

`void`: another attempt is the valid one, or rows of this one are void. `holdout`: no probe's abort was applied, of
`holdout_share` of the requests; both null where the final does not say. Labels follow, `label.{name}`.
"""

LABEL_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("name", pa.string()),
        ("value", pa.string()),
        ("token_start", pa.int32()),
        ("token_end", pa.int32()),
        ("source", pa.string()),
        ("version", pa.string()),
        ("sampling_probability", pa.float64()),
        ("created_at_us", pa.int64()),
    ]
)


def data_file(part: str, shard: int) -> str:
    """Return the name of a part's table of tokens, relative to the folder."""
    return f"data/{part}-{shard:05d}.parquet"


def tensor_file(part: str, shard: int) -> str:
    """Return the name of a part's file of tensors, relative to the folder."""
    return f"tensors/{part}-{shard:05d}.safetensors"


def tensor_key(point: str, layer: int) -> str:
    """Return under which key a layer's rows stand."""
    return f"{point}.{layer}"


def with_columns(schema: pa.Schema, prefix: str, names: Iterable[str], kind: pa.DataType) -> pa.Schema:
    """Return a schema with further columns, `{prefix}{name}`."""
    return pa.schema([*schema, *(pa.field(prefix + name, kind) for name in names)])


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of every file of a dataset but its manifest and what begins with a dot, by name."""
    found = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST and path.name[0] != "."
    )
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in found
    }


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest in one step: it is there whole, or as it was."""
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a dataset.

    Raises:
        DatasetError: the folder is no dataset of this format, or its export did not come to its end.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        begun = (folder / UNFINISHED).exists()
        why = "its export did not finish: run it again" if begun else "this is no dataset, or its export did not finish"
        raise DatasetError(f"{folder}: no {MANIFEST}: {why}") from exc
    except (ValueError, OSError) as exc:
        raise DatasetError(f"{path}: cannot be read: {exc}") from exc
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DatasetError(f"{path}: field 'format': expected {FORMAT!r}")
    if manifest.get("version") != VERSION:
        raise DatasetError(f"{path}: field 'version': {manifest.get('version')!r}; this version reads {VERSION}")
    for name in ("files", "points", "split", "counts"):
        if not isinstance(manifest.get(name), dict):
            raise DatasetError(f"{path}: field {name!r}: expected an object: export the dataset again")
    return cast(dict[str, Any], manifest)


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return a table of a dataset.

    Args:
        path: of the file.
        columns: those that are wanted; all by default.

    Raises:
        DatasetError: it is missing, damaged, or has no such column.
    """
    try:
        return pq.read_table(path, columns=None if columns is None else list(columns))
    except (OSError, pa.ArrowException) as exc:
        raise DatasetError(f"{path}: cannot be read: {exc}") from exc


def check_files(folder: Path, manifest: Mapping[str, Any], names: Iterable[str] | None = None) -> list[str]:
    """Return what is wrong with a dataset's files: one line for each that is missing or has changed.

    Args:
        folder: of the dataset.
        manifest: its manifest.
        names: some of its files; all by default.
    """
    wrong = []
    for name in manifest["files"] if names is None else names:
        path, facts = folder / name, manifest["files"].get(name)
        if facts is None:
            wrong.append(f"{name}: the manifest does not name it")
            continue
        if not path.is_file():
            wrong.append(f"{name}: is missing")
        elif path.stat().st_size != facts["bytes"]:
            wrong.append(f"{name}: {path.stat().st_size} bytes, the manifest says {facts['bytes']}")
        elif sha256_of(path) != facts["sha256"]:
            wrong.append(f"{name}: its sha256 is not that of the manifest")
    return wrong


def readme(manifest: Mapping[str, Any], data_files: Sequence[str]) -> str:
    """Return the text of README.md; its header names the tables to `datasets.load_dataset`.

    Args:
        manifest: all but the files' sums.
        data_files: tables of tokens, relative names.
    """
    lines = ["---", "configs:"]
    for name, file in (("requests", REQUESTS), ("streams", STREAMS), ("labels", LABELS)):
        lines += [f"- config_name: {name}", f"  data_files: {file}"]
    parts = [part for part in PARTS if any(file.startswith(f"data/{part}-") for file in data_files)]
    if parts:
        lines += ["- config_name: tokens", "  data_files:"]
        for part in parts:
            lines += [f"  - split: {part}", f"    path: data/{part}-*.parquet"]
    counts = manifest["counts"]
    return "\n".join(
        [
            *lines,
            "---",
            "",
            "# Recorded activations",
            "",
            f"{counted(counts['requests'], 'request')} with {counted(counts['rows'], 'activation row')}, exported on "
            f"{manifest['created_at']} from topics of an Undercurrent pipeline.",
            "",
            f"- Split by `{manifest['split']['group_by']}`: "
            + ", ".join(f"{part} {counts['requests_by_split'].get(part, 0)}" for part in PARTS),
            f"- Convention: {LAYER_CONVENTION}.",
            "- `shard` and `row` of a token's row say where its tensor is: row `row` of key `{point}.{layer}` in",
            "  `tensors/{split}-{shard:05d}.safetensors`.",
            "- An unlabelled request is `unknown`, never negative.",
            "- What retention had deleted, and every record that was left out, is counted in `manifest.json`.",
            "",
            "```python",
            "from undercurrent import evaluation",
            "",
            "data = evaluation.load(DIR)",
            "data.requests, data.tokens                  # pandas",
            *(
                f'data.tensor("{point}", {facts[0]["layers"][0]}, "fit")   # memory-mapped [rows, width]'
                for point, facts in list(manifest["points"].items())[:1]
                if facts and facts[0]["layers"]
            ),
            "```",
            "",
        ]
    )
