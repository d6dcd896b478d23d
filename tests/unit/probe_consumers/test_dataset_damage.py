"""Datasets that were changed, damaged or not finished: named, and judged by no part of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from probe_consumers.dataset_streams import ended_of
from tests.unit.full_disk import full_disk
from tests.unit.probe_consumers.dataset_doubles import Topics, recorded, rows
from undercurrent import evaluation
from undercurrent.errors import DatasetError
from undercurrent.protocol.streams import StreamTable
from undercurrent.testing.streams import StreamBuilder


@pytest.fixture
def folder(tmp_path):
    recorded().export(tmp_path / "d")
    return tmp_path / "d"


def test_a_changed_file_and_an_unfinished_folder_are_found(folder):
    data = evaluation.load(folder)
    assert data.verify() == []
    name = "requests.parquet"
    facts = data.manifest["files"][name]
    assert facts["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    changed = bytearray((folder / name).read_bytes())
    changed[100] ^= 1
    (folder / name).write_bytes(changed)
    (folder / "README.md").unlink()
    assert data.verify() == ["README.md: is missing", "requests.parquet: its sha256 is not that of the manifest"]
    (folder / "manifest.json").unlink()
    with pytest.raises(DatasetError, match="did not finish"):
        evaluation.load(folder)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def lose_fields(folder):
    told = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(told | {"files": None}))


def lose_part(folder):
    told = json.loads((folder / "manifest.json").read_text())
    told["files"] = {name: facts for name, facts in told["files"].items() if not name.startswith("data/fit")}
    (folder / "manifest.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: cut(folder / "tensors/fit-00000.safetensors"), r"fit-00000.safetensors: \d+ bytes, .* damaged"),
        (lambda folder: flip(folder / "tensors/fit-00000.safetensors"), "fit-00000.safetensors: its sha256 is not"),
        (lambda folder: cut(folder / "data/fit-00000.parquet"), r"fit-00000.parquet: \d+ bytes, the manifest says"),
        (lambda folder: flip(folder / "requests.parquet"), "requests.parquet: its sha256 is not"),
        (lambda folder: (folder / "streams.parquet").unlink(), "streams.parquet: is missing"),
        (lose_fields, "field 'files': expected an object"),
        (lose_part, "at residual: 0 positions, streams.parquet says 7"),
    ],
)
def test_a_damaged_file_is_named_where_it_is_read_and_nothing_is_judged_without_it(folder, damage, said):
    damage(folder)
    with pytest.raises(DatasetError, match=said):
        list(evaluation.load(folder).blocks("residual", split="fit"))


def test_an_end_whose_counts_do_not_go_together_is_exported_as_far_as_it_tells():
    stream, table = StreamBuilder("r", layers=(0, 1)), StreamTable("residual")
    table.observe(0, stream.started())
    [closed] = table.observe(1, replace(stream.ended(), emitted=(3, 4), dropped=(1,)))
    found = ended_of(closed.stream)
    assert (found["layers"], found["emitted"], found["dropped"]) == ([0, 1], [3, 4], [1, 0])


@pytest.mark.parametrize(
    ("most_bytes", "file"), [(4096, r"\.facts\.sqlite: cannot be written: "), (60_000, r"tensors/fit-0\S* cannot be")]
)
def test_a_full_disk_is_said_with_the_file_and_leaves_no_dataset(tmp_path, most_bytes, file):
    topics, out = Topics(), tmp_path / "d"
    for number in range(20):
        stream = StreamBuilder(f"r{number}", layers=(3, 5), prompt_len=2, width=64, dtype="float32")
        topics.activations(
            stream, stream.start(), stream.block(list(range(40)), rows(f"r{number}", 40, width=64)), stream.end()
        )
    with full_disk(most_bytes), pytest.raises(DatasetError, match=file):
        topics.export(out)
    with pytest.raises(DatasetError, match="did not finish: run it again"):
        evaluation.load(out)
    topics.export(out)
    assert evaluation.load(out).verify() == []
