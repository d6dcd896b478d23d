"""A full disk is said with the file that did not fit."""

from __future__ import annotations

import errno
from pathlib import Path

import pyarrow as pa
import pytest

from probe_consumers.replay_store import write_json
from probe_consumers.replay_tables import write_parquet
from undercurrent.evaluation.dataset_format import write_manifest
from undercurrent.files import write_text, writing

FULL = Path("/dev/full")
SCHEMA = pa.schema([("n", pa.int64())])
BATCH = pa.record_batch([pa.array(range(100_000))], SCHEMA)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("t.txt", lambda path: write_text(path, "x" * 100_000)),
        ("plan.new", lambda path: write_json(path.with_suffix(".json"), ["x" * 100_000])),
        ("manifest.json.new", lambda path: write_manifest(path.parent, {"x": "x" * 100_000})),
        ("scores.new", lambda path: write_parquet(path.with_suffix(".parquet"), SCHEMA, [BATCH])),
    ],
)
def test_a_full_disk_is_said_with_the_file(name: str, write, tmp_path: Path) -> None:
    path = tmp_path / name
    path.symlink_to(FULL)
    with pytest.raises(OSError, match="No space left") as caught:
        write(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


def test_an_error_that_names_a_file_keeps_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, writing(tmp_path / "outer"):
        (tmp_path / "inner").read_text()
    assert caught.value.filename == str(tmp_path / "inner")
