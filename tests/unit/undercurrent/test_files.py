"""A file is written whole or not at all, and a full disk is said with the file that did not fit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from probe_consumers.replay_store import write_json
from probe_consumers.replay_tables import write_parquet
from tests.unit.full_disk import full_disk
from undercurrent.capture.projection import projection_from, write_projection
from undercurrent.cli.init import write as write_init
from undercurrent.errors import ConfigError
from undercurrent.evaluation.dataset_format import write_manifest
from undercurrent.files import is_fresh, replacing, together, write_bytes, write_text, writing
from undercurrent.probes import LinearProbe
from undercurrent.probes.folder import WEIGHTS_NAME

SCHEMA = pa.schema([("n", pa.int64())])
BATCH = pa.record_batch([pa.array(range(100_000))], SCHEMA)
MUCH = "x" * 100_000
Write = Callable[[Path], object]


def probe(width: int) -> LinearProbe:
    return LinearProbe.from_arrays(
        [1.0] * width, 0.0, layer=2, tensor_type="residual_stream", threshold=float(width), name="guard"
    )


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("t.txt", lambda path: write_text(path, MUCH)),
        ("plan.json", lambda path: write_json(path, [MUCH])),
        ("manifest.json", lambda path: write_manifest(path.parent, {"x": MUCH})),
        ("scores.parquet", lambda path: write_parquet(path, SCHEMA, [BATCH])),
        ("projection.safetensors", lambda path: write_projection(projection_from(np.ones((32, 64)), "a test"), path)),
        (WEIGHTS_NAME, lambda path: probe(5000).save(path.parent)),
    ],
)
def test_a_full_disk_is_said_with_the_file_and_leaves_what_was_there(name: str, write: Write, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("before")
    with full_disk(), pytest.raises(OSError, match="File too large") as caught:
        write(path)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_probe_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    probe(4).save(tmp_path)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        probe(5000).save(tmp_path)
    assert LinearProbe.from_folder(tmp_path).fingerprint == probe(4).fingerprint
    probe(8).save(tmp_path)
    assert LinearProbe.from_folder(tmp_path).fingerprint == probe(8).fingerprint


def test_a_scaffold_that_does_not_fit_leaves_nothing_of_it(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(ConfigError, match=r"engine\.yaml: cannot be written: File too large"):
        write_init(tmp_path / "new", {"points.yaml": "fits", "engine.yaml": MUCH}, force=False)
    assert list((tmp_path / "new").iterdir()) == []


def test_what_marks_a_whole_goes_first_and_comes_last(tmp_path: Path) -> None:
    for name in ("mark", "other"):
        (tmp_path / name).write_text("old")
    (tmp_path / "other").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "held").touch()

    def write() -> None:
        with together(tmp_path, last="mark") as fresh:
            for name in ("mark", "other"):
                write_text(fresh / name, "new")

    with pytest.raises(OSError, match="directory") as caught:
        write()
    assert caught.value.filename == str(tmp_path / "other")
    assert not (tmp_path / "mark").exists(), "new files and old ones pass for one thing"


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_bytes(pipe, b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(Path("/dev/full"), "x")
    assert caught.value.filename == "/dev/full"
    assert Path("/dev/full").is_char_device()


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "x"


def test_what_a_dead_writer_left_is_known(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as fresh:
        assert is_fresh(fresh)
        fresh.touch()
    with together(tmp_path / "b") as folder:
        assert is_fresh(folder)
    assert not is_fresh(tmp_path / "a")


def test_an_error_that_names_a_file_keeps_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, writing(tmp_path / "outer"):
        (tmp_path / "inner").read_text()
    assert caught.value.filename == str(tmp_path / "inner")
