"""A request taken out of a dataset, and kept out of every later one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from probe_consumers.dataset_erased import prefix_of
from tests.unit.probe_consumers.dataset_doubles import CODEC, NAMES, Topics, recorded
from undercurrent import evaluation
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.errors import DatasetError, ReplayError
from undercurrent.evaluation.dataset_format import check_files, read_manifest
from undercurrent.evaluation.erasing import erase_from_folder, requests_in
from undercurrent.protocol.erasures import Erasures, digest
from undercurrent.protocol.messages import Erasure


@pytest.fixture
def folder(tmp_path):
    recorded().export(tmp_path / "d")
    return tmp_path / "d"


def mark(topics: Topics, request_id: str) -> None:
    erasure = Erasure(request_sha256=digest(request_id), erased_at_us=1)
    topics.logs.append(topics.plan.erasures, CODEC.encode(erasure), key=erasure.request_sha256.encode(), partition=0)


def rows_of(folder) -> dict[str, bytes]:
    return {
        block.request_id: b"".join(np.ascontiguousarray(rows).tobytes() for rows in block.rows.values())
        for block in evaluation.load(folder).blocks("residual")
    }


def everything(folder) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_nothing_of_it_is_left_and_the_others_are_bit_for_bit_as_they_were(folder):
    before, manifest = rows_of(folder), read_manifest(folder)
    # A row of it, as it stands in the file of tensors.
    piece = before["r1"][: len(before["r1"]) // 14]
    assert piece in everything(folder)
    result = erase_from_folder(folder, "r1")
    assert result.left == []
    assert result.tensor_rows == 14
    after = everything(folder)
    assert b'"r1"' not in after
    assert b"prompt of r1" not in after
    assert piece not in after
    assert rows_of(folder) == {name: rows for name, rows in before.items() if name != "r1"}
    fresh = read_manifest(folder)
    assert check_files(folder, fresh) == []
    assert fresh["counts"]["requests"] == manifest["counts"]["requests"] - 1
    assert fresh["counts"]["rows"] == manifest["counts"]["rows"] - 14
    assert fresh["counts"]["requests_by_label"]["bad"]["unknown"] == 10
    assert fresh["erased"] == [digest("r1")]


def test_it_may_be_repeated_and_goes_on_where_it_was_interrupted(folder):
    whole = read_manifest(folder)
    (folder / "requests.parquet").write_bytes((folder / "requests.parquet").read_bytes())
    erase_from_folder(folder, "r1")
    # As if it had died before the manifest was written.
    (folder / "manifest.json").write_text(json.dumps(whole))
    assert check_files(folder, whole)
    erase_from_folder(folder, "r1")
    assert check_files(folder, read_manifest(folder)) == []
    assert erase_from_folder(folder, "r1").rows == {}


def test_several_are_taken_out_at_once_and_all_are_said_to_be_gone(folder):
    before, whole = rows_of(folder), read_manifest(folder)
    (folder / "report.html").write_text("<p>r10 was stopped</p>")
    assert requests_in(folder) == set(NAMES)
    assert erase_from_folder(folder, "r1", "r10", "nobody").left == ["report.html"]
    assert requests_in(folder) == set(NAMES) - {"r1", "r10"}
    assert rows_of(folder) == {name: rows for name, rows in before.items() if name not in ("r1", "r10")}
    fresh = read_manifest(folder)
    assert fresh["counts"]["requests"] == whole["counts"]["requests"] - 2
    assert fresh["erased"] == sorted(map(digest, ("r1", "r10", "nobody")))
    (folder / "report.html").unlink()
    assert erase_from_folder(folder, "r1", "r10").left == []
    assert check_files(folder, read_manifest(folder)) == []


def test_the_command_takes_named_requests_out_without_a_broker(folder, capsys):
    arguments = ["dataset", "erase", str(folder), "--request-id", "r1", "--request-id", "nobody"]
    assert run(app, PROG_NAME, arguments) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{folder}: 14 rows of tensors overwritten, ")
    assert ", 1 row of requests.parquet" in said.out
    assert said.err == f"{folder}: no table holds request nobody\n"
    assert "r1" not in rows_of(folder)
    (folder / "report.html").write_text("<p>r2 was stopped</p>")
    assert run(app, PROG_NAME, ["dataset", "erase", str(folder), "--request-id", "r2"]) == 1
    assert f"{folder / 'report.html'}: still names what is erased: delete it" in capsys.readouterr().err


def test_the_command_says_what_it_lacks(folder, capsys, monkeypatch):
    monkeypatch.delenv("UNDERCURRENT_BOOTSTRAP_SERVERS", raising=False)
    assert run(app, PROG_NAME, ["dataset", "erase", str(folder)]) == 2
    assert "no broker named: give --bootstrap-servers" in capsys.readouterr().err
    assert run(app, PROG_NAME, ["dataset", "erase", str(folder), "--request-id", "r1", "--prefix", "x"]) == 2
    assert "--prefix: says where to ask which requests are erased" in capsys.readouterr().err
    assert "r1" in rows_of(folder)


def test_a_dataset_knows_whose_topics_it_was_exported_from(folder, tmp_path):
    assert prefix_of(folder) == "undercurrent"
    manifest = read_manifest(folder)
    topics = manifest["source"]["topics"]
    manifest["source"]["topics"] = {
        "a.activations.generations": {},
        "a.generations": topics["undercurrent.generations"],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert prefix_of(folder) == "a"
    assert prefix_of(tmp_path) is None


def test_a_folder_without_tables_is_refused_and_so_is_the_command_before_it_marks_anything(tmp_path, capsys):
    (tmp_path / "notes.json").write_text('["r1"]')
    with pytest.raises(DatasetError, match="holds no table of requests; accepted: a dataset"):
        erase_from_folder(tmp_path, "r1")
    arguments = ["erase", "--request-id", "r1", "--folder", str(tmp_path)]
    # No broker is named: it is not come to that.
    assert run(app, PROG_NAME, arguments) == 2
    assert f"--folder {tmp_path}: holds no table" in capsys.readouterr().err
    assert (tmp_path / "notes.json").read_text() == '["r1"]'


def test_a_request_whose_id_begins_another_s_is_one_request(folder):
    assert {"r1", "r10"} <= set(NAMES)
    erase_from_folder(folder, "r1")
    assert "r10" in rows_of(folder)


def test_files_that_cannot_be_mended_are_named(folder):
    (folder / "report.html").write_text("<p>r1 was stopped</p>")
    (folder / "notes.json").write_text('{"worst": [{"request_id": "r1", "score": 2}, {"request_id": "r2"}]}')
    (folder / "r1.json").write_text('{"request_id": "r1", "score": 2}')
    assert erase_from_folder(folder, "r1").left == ["report.html"]
    assert not (folder / "r1.json").exists()
    assert json.loads((folder / "notes.json").read_text()) == {"worst": [{"request_id": "r2"}]}


def test_no_folder_and_a_damaged_table_are_named(folder, tmp_path):
    with pytest.raises(DatasetError, match="nowhere: there is no such folder"):
        erase_from_folder(tmp_path / "nowhere", "r1")
    (folder / "streams.parquet").write_bytes(b"PAR1")
    with pytest.raises(DatasetError, match=r"streams\.parquet"):
        erase_from_folder(folder, "r1")


def test_an_export_leaves_an_erased_request_out(tmp_path):
    topics = recorded()
    topics.label("r1", "positive", source="another")
    mark(topics, "r1")
    topics.export(tmp_path / "d")
    assert b"prompt of r1" not in everything(tmp_path / "d")
    assert sorted(rows_of(tmp_path / "d")) == sorted(set(NAMES) - {"r1"})
    labels = evaluation.load(tmp_path / "d").labels
    assert "r1" not in set(labels["request_id"])


def test_an_export_of_it_by_name_is_refused_before_anything_is_written(tmp_path):
    topics = recorded()
    mark(topics, "r1")
    with pytest.raises(ReplayError, match="erased, and neither shown, exported nor replayed again: r1"):
        topics.export(tmp_path / "d", requests=frozenset({"r1", "r2"}))
    assert not (tmp_path / "d").exists()


def test_the_mark_knows_requests_by_hash_and_keys_of_labels():
    erasures = Erasures()
    erasures.add(digest("r1").encode(), b"mark")
    assert "r1" in erasures
    assert "r10" not in erasures
    assert erasures.covers(b"r1")
    assert not erasures.covers(None)
    assert erasures.covers_label(b"r1|bad|judge")
    assert not erasures.covers_label(b"r1")
    erasures.refuse(["r2", "r10"])
    with pytest.raises(ReplayError, match=r"again: r1$"):
        erasures.refuse(["r2", "r1"])
    erasures.add(digest("r1").encode(), None)
    assert "r1" not in erasures
