"""Recorded topics as a command's input: as a dataset's folder would be, in one part what shares text, whole or not."""

from __future__ import annotations

import fcntl
import tempfile
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest

from probe_consumers.dataset_export import ExportOrder
from probe_consumers.dataset_telling import told
from probe_consumers.recorded import TopicRange, recorded
from probe_consumers.recording_options import JudgingOptions, SourceOptions
from tests.unit.probe_consumers.dataset_doubles import Topics, rows
from undercurrent import evaluation
from undercurrent.cli.progress import progress
from undercurrent.errors import ConfigError, DatasetError, UnreachableError
from undercurrent.evaluation.dataset_folder import under_way
from undercurrent.evaluation.dataset_split import SplitRule
from undercurrent.evaluation.duplicates import find_duplicates
from undercurrent.evaluation.passages import Passages
from undercurrent.testing.streams import StreamBuilder

SHARED = " ".join(f"word{number}" for number in range(13))
TWELVE = " ".join(f"other{number}" for number in range(12))


def add(topics, name, text, **fields):
    topics.prompt(name, text, **fields)
    stream = StreamBuilder(name, layers=(3,))
    topics.activations(stream, stream.start(), stream.block([0, 1], rows(name, 2, layers=1)), stream.end())
    topics.answer(name, "ab")


@pytest.fixture
def topics():
    """Forty requests of their own; six that share thirteen words, four of one text, six that share twelve words."""
    made = Topics()
    for number in range(40):
        add(made, f"own{number}", f"question {number}")
    for number in range(6):
        add(made, f"near{number}", f"{number} asks {SHARED} of {number}")
        add(made, f"far{number}", f"a{number} {TWELVE} b{number}")
    for number in range(4):
        add(made, f"same{number}", "What is THE time?" if number % 2 else "what is the time")
    return made


def parts(folder):
    return pd.read_parquet(folder / "requests.parquet").set_index("request_id")["split"]


def test_requests_that_share_text_are_brought_into_one_part_and_counted(topics, tmp_path):
    left = topics.export(tmp_path / "left", keep_duplicates=True)
    drawn = parts(tmp_path / "left")
    near, same = drawn[drawn.index.str.startswith("near")], drawn[drawn.index.str.startswith("same")]
    assert near.nunique() > 1
    assert same.nunique() > 1
    assert left["split"]["duplicates"] == {
        "rule": "13 words in a row of the prompt, without case and punctuation",
        "kept": True,
        "exact_across": 4,
        "near_across": 10,
        "moved": 0,
    }
    assert "10 requests share their prompt (4), or 13 words in a row of it" in told(tmp_path / "left", left)

    manifest = topics.export(tmp_path / "d")
    settled = parts(tmp_path / "d")
    # To the earliest part that one of them was drawn for: a test part loses requests, and never its honesty.
    order = ["fit", "threshold", "test"]
    for found in (near, same):
        assert set(settled[found.index]) == {min(found, key=order.index)}
    others = drawn.index.difference(near.index).difference(same.index)
    assert (settled[others] == drawn[others]).all()
    counts = manifest["split"]["duplicates"]
    assert counts["moved"] == int((settled != drawn).sum()) > 0
    assert (counts["exact_across"], counts["near_across"], counts["kept"]) == (4, 10, False)
    assert f"{counts['moved']} moved, so that each is in one part" in told(tmp_path / "d", manifest)
    in_streams = pd.read_parquet(tmp_path / "d" / "streams.parquet").set_index("request_id")["split"]
    assert (in_streams == settled[in_streams.index]).all()


def test_a_group_follows_its_request(topics, tmp_path):
    for number in range(12):
        add(topics, f"g{number}a", f"chat {number} {SHARED}", metadata={"chat": f"c{number}"})
        add(topics, f"g{number}b", f"reply {number}", metadata={"chat": f"c{number}"})

    topics.export(tmp_path / "d", split=SplitRule(group_by="chat"))
    settled = parts(tmp_path / "d")
    assert set(settled[settled.index.str.startswith("g")]) == {"fit"}


def test_only_exported_requests_are_counted_though_all_prompts_decide(topics, tmp_path):
    topics.export(tmp_path / "whole")
    manifest = topics.export(tmp_path / "d", requests=frozenset(["near0", "own3"]))
    assert manifest["split"]["duplicates"]["near_across"] == 0
    settled, whole = parts(tmp_path / "d"), parts(tmp_path / "whole")
    assert settled.to_dict() == whole[settled.index].to_dict()


def test_passages_beyond_memory_are_grouped_as_those_within(tmp_path):
    rng = np.random.default_rng(0)
    given = [np.unique(rng.integers(-(2**62), 2**62, 50)) for _ in range(20)]
    given[7][:5] = given[3][:5]
    held, spilled = Passages(), Passages(tmp_path, held_pairs=120)
    for owner, found in enumerate(given):
        held.add(found, owner)
        spilled.add(found, owner)
    [(passage, owner)] = held.groups()
    files = list(spilled.groups())
    assert len(files) > 1
    assert not list(tmp_path.iterdir())
    expected = sorted(zip(passage.tolist(), owner.tolist(), strict=True))
    assert sorted(pair for one in files for pair in zip(*map(np.ndarray.tolist, one), strict=True)) == expected
    assert all((np.diff(one) >= 0).all() for one, _ in files)
    assert find_duplicates([]).near.size == 0


class Broken(Topics):
    """Topics whose broker goes away in the middle of an export."""

    def part(self, topic, asked, *, committed=False):
        found = super().part(topic, asked, committed=committed)
        if found is None or "activations" not in topic:
            return found

        def records():
            for number, record in enumerate(found.records):
                if number == 30:
                    raise UnreachableError("no broker answers")
                yield record

        return type(found)(found.spans, found.deleted, records())


def test_an_interrupted_export_is_no_dataset_and_begins_again_in_the_same_folder(topics, tmp_path):
    broken = Broken()
    broken.logs = topics.logs
    folder = tmp_path / "d"
    with pytest.raises(UnreachableError):
        broken.export(folder, shard_bytes=1000)
    assert list(folder.glob("tensors/*"))
    with pytest.raises(DatasetError, match="its export did not finish: run it again"):
        evaluation.load(folder)
    topics.export(folder)
    topics.export(tmp_path / "fresh")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert names == {path.relative_to(tmp_path / "fresh").as_posix() for path in (tmp_path / "fresh").rglob("*")}
    assert evaluation.load(folder).verify() == []
    with pytest.raises(DatasetError, match="is there already"):
        topics.export(folder)


def test_one_export_at_a_time_writes_a_folder(topics, tmp_path):
    with under_way(tmp_path / "d"), pytest.raises(DatasetError, match="another export is writing it"):
        topics.export(tmp_path / "d")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "thesis.tex").touch()
    with pytest.raises(DatasetError, match="is there already"):
        topics.export(tmp_path / "e")
    assert (tmp_path / "e" / "thesis.tex").exists()
    with (tmp_path / "free").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_topic_is_read_as_its_dataset_would_be_and_leaves_nothing(topics, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    topics.export(tmp_path / "d")
    done = []

    @contextmanager
    def watch(total):
        done.append(total)
        yield done.append

    source = TopicRange(topics, topics.plan, ExportOrder(points=("residual",)))
    with recorded(source, progress=watch) as data, recorded(tmp_path / "d") as plain:
        assert data.path != plain.path
        given, expected = (
            {block.request_id: (block.split, block.rows[3].tobytes()) for block in found.blocks("residual")}
            for found in (data, plain)
        )
        assert given == expected
        assert len(given) == 56
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]
    assert done[0] == sum(done[1:]) > 56 * 3
    with recorded(source, keep=tmp_path / "kept"):
        pass
    assert evaluation.load(tmp_path / "kept").verify() == []


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys):
    with progress("exporting", 1000, every_s=0.0) as advance:
        advance(250)
    assert capsys.readouterr().err.startswith("exporting: 250 of 1,000 records, ")
    with progress("exporting", 1000) as advance:
        advance(250)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("nowhere", {}, "there is no such folder; accepted: the folder of a dataset, or topic:POINT"),
        (".", {"since": "2026-01-01"}, "--since: says what to read of a topic, but . is a dataset"),
        (".", {"keep_duplicates": True}, "--keep-duplicates: says"),
        ("topic:residual", {}, "no broker named"),
    ],
)
def test_what_a_source_is_not_is_told(text, options, says, monkeypatch):
    monkeypatch.delenv("UNDERCURRENT_BOOTSTRAP_SERVERS", raising=False)
    with pytest.raises(ConfigError, match=says):
        SourceOptions(**options).source(text)


def test_groups_of_who_judges_are_the_exports_or_in_place_of_the_datasets(tmp_path, monkeypatch):
    monkeypatch.delenv("UNDERCURRENT_BOOTSTRAP_SERVERS", raising=False)
    by_user = JudgingOptions(group_by="user")
    assert by_user.recording(str(tmp_path)) == tmp_path
    assert by_user.regrouped(str(tmp_path)) == "user"
    assert by_user.regrouped("topic:residual") is None
    assert JudgingOptions().regrouped(str(tmp_path)) is None
    with pytest.raises(ConfigError, match="--salt: says what to read of a topic"):
        JudgingOptions(salt="x").recording(str(tmp_path))
