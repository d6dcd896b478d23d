"""A replay as a whole: the same bytes however often it died and whoever did it, and nothing else in its folder."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from io import StringIO

import pandas as pd
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from probe_consumers import replay_merge, replay_progress
from probe_consumers.replay_command import replay
from tests.unit.probe_consumers.replay_doubles import Killed, Mortal, bytes_of, order, record, run, save_probe
from undercurrent.errors import ConfigError, ReplayError
from undercurrent.evaluation.inputs import table_of

NAMES = [f"r{number}" for number in range(9)]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return record(tmp_path_factory.mktemp("recording") / "d", NAMES)


@pytest.fixture
def probes(tmp_path):
    return save_probe(tmp_path)


def test_verdicts_scores_and_a_summary_are_written(recording, probes, tmp_path):
    summary = run(recording, probes, tmp_path / "o").summary
    assert json.loads((tmp_path / "o" / "summary.json").read_text()) == summary
    told = summary["by_probe"]["guard"]
    assert (told["streams"], told["errors"], summary["scores"]) == (9, 0, 72)
    assert sum(told["verdicts"].values()) == 9
    assert told["rates"]["abort"] == told["actions"]["abort"] / 9
    assert (
        sorted(
            pq.read_table(tmp_path / "o" / "verdicts.parquet", filters=[("kind", "==", "result")])[
                "request_id"
            ].to_pylist()
        )
        == NAMES
    )
    assert pq.read_table(tmp_path / "o" / "scores.parquet").num_rows == 72
    assert not (tmp_path / "o" / "progress").exists()


def test_an_evaluation_reads_the_results(recording, probes, tmp_path):
    run(recording, probes, tmp_path / "o")
    table = pd.read_parquet(tmp_path / "o" / "verdicts.parquet", filters=[("kind", "==", "result")])
    joined = table_of(table.set_index("request_id")["score"], dict.fromkeys(NAMES[:3], "positive"), None, None)
    assert (len(joined), sorted(joined["label"].unique())) == (9, ["positive", "unknown"])
    assert joined["score"].notna().all()


@pytest.mark.parametrize("after", [False, True])
def test_a_replay_that_died_anywhere_goes_on_to_the_same_bytes(recording, probes, tmp_path, monkeypatch, after):
    mortal = Mortal(monkeypatch)
    run(recording, probes, tmp_path / "whole")
    expected, steps = bytes_of(tmp_path / "whole"), mortal.steps
    assert steps > 10
    for at in range(1, steps + 1):
        mortal.steps, mortal.dies_at, mortal.after = 0, at, after
        out = tmp_path / f"{at}"
        with pytest.raises(Killed):
            run(recording, probes, out)
        mortal.dies_at = -1
        run(recording, probes, out)
        assert bytes_of(out) == expected


def test_a_replay_that_dies_at_every_step_comes_to_its_end(recording, probes, tmp_path, monkeypatch):
    mortal = Mortal(monkeypatch)
    run(recording, probes, tmp_path / "whole")
    steps, deaths = mortal.steps, 0
    while deaths <= steps:
        mortal.steps, mortal.dies_at, mortal.after = 0, 1, True
        try:
            run(recording, probes, tmp_path / "o")
            break
        except Killed:
            deaths += 1
    assert deaths == steps
    assert bytes_of(tmp_path / "o") == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("what", ["verdicts.parquet", "scores.parquet", "summary.json"])
def test_a_death_while_the_results_are_written_loses_nothing(recording, probes, tmp_path, monkeypatch, what):
    run(recording, probes, tmp_path / "whole")
    written = {name: getattr(replay_merge, name) for name in ("write_parquet", "write_json")}

    def dies(name):
        def write(path, *rest):
            if path.name == what:
                raise Killed
            written[name](path, *rest)

        return write

    for name in written:
        monkeypatch.setattr(replay_merge, name, dies(name))
    with pytest.raises(Killed):
        run(recording, probes, tmp_path / "o")
    for name, write in written.items():
        monkeypatch.setattr(replay_merge, name, write)
    run(recording, probes, tmp_path / "o")
    assert bytes_of(tmp_path / "o") == bytes_of(tmp_path / "whole")


def test_two_processes_write_the_same_bytes_as_one(recording, probes, tmp_path):
    run(recording, probes, tmp_path / "one")
    run(recording, probes, tmp_path / "two", workers=2)
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


def test_a_folder_of_another_replay_is_refused_with_what_differs(recording, probes, tmp_path):
    run(recording, probes, tmp_path / "o")
    with pytest.raises(ReplayError, match=r'o: holds another replay \(requests: nothing there, \["r1"\] asked for'):
        run(recording, probes, tmp_path / "o", requests=frozenset({"r1"}))
    save_probe(tmp_path, threshold=1.6)
    with pytest.raises(ReplayError, match=r"probe guard: .*fingerprint"):
        run(recording, probes, tmp_path / "o")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with pytest.raises(ReplayError, match=r"holds thesis\.txt and no plan of a replay"):
        run(recording, probes, tmp_path / "mine")


def test_a_folder_that_cannot_be_written_is_named(recording, probes, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ReplayError, match=r"file/out: results cannot be written there: Not a directory"):
        run(recording, probes, tmp_path / "file" / "out")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_summary_is_named(recording, probes, tmp_path, content):
    run(recording, probes, tmp_path / "o")
    (tmp_path / "o" / "summary.json").write_text(content)
    with pytest.raises(ReplayError, match=r"summary\.json: cannot be read: .*remove the folder"):
        run(recording, probes, tmp_path / "o")


def test_a_dataset_of_no_requests_is_replayed_to_nothing(probes, tmp_path):
    summary = run(record(tmp_path / "d", []), probes, tmp_path / "o").summary
    assert (summary["by_probe"]["guard"]["streams"], summary["scores"]) == (0, 0)


def test_only_some_requests_are_replayed(recording, probes, tmp_path):
    summary = run(recording, probes, tmp_path / "o", requests=frozenset({"r1", "r7"})).summary
    assert (summary["by_probe"]["guard"]["streams"], summary["requests"]) == (2, 2)
    assert summary["records"]["of_other_requests"] == summary["records"]["read"] - 20
    summary = run(recording, probes, tmp_path / "p", last=4).summary
    assert summary["by_probe"]["guard"]["streams"] == 4


def test_what_says_the_same_thing_twice_is_refused(recording, probes, tmp_path):
    for fields, said in (
        ({"last": 3, "requests": frozenset({"a"})}, "--last and --request: both choose requests"),
        ({"last": 3, "labels": (("bad", "positive"),)}, "--last and --label"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(recording, probes, tmp_path / "o", **fields)


def test_two_replays_are_compared_and_a_changed_threshold_is_seen(recording, probes, tmp_path):
    run(recording, probes, tmp_path / "a")
    same = run(recording, probes, tmp_path / "b", compare=str(tmp_path / "a")).diff
    assert (same.equal, same.verdicts_compared, same.scores_compared) == (True, 9, 72)
    save_probe(tmp_path, threshold=-1e6)
    other = run(recording, probes, tmp_path / "c", compare=str(tmp_path / "a")).diff
    assert (other.equal, other.decisions_changed > 0, other.scores_compared) == (False, True, 72)
    nothing = run(recording, probes, tmp_path / "d", requests=frozenset({"nobody"}), compare=str(tmp_path / "a")).diff
    assert (nothing.equal, nothing.empty) == (False, True)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_how_far_it_is_is_shown_as_a_bar_or_as_lines(recording, probes, tmp_path, monkeypatch, is_terminal):
    Mortal(monkeypatch)
    monkeypatch.setattr(replay_progress, "_LINE_EVERY_S", 0.0)
    console = Console(file=StringIO(), force_terminal=is_terminal, width=100)
    made = order(recording, probes, tmp_path / "o")
    replay(made, lambda out, plan: replay_progress.shown(out, plan, console))
    text = console.file.getvalue()
    assert "/s" in text
    assert ("\x1b[" in text) == is_terminal
    if not is_terminal:
        first, *_, last = text.splitlines()
        assert re.fullmatch(r"7 of \d+ offsets, \S+ \S+/s, \d+ s left", first)
        assert re.fullmatch(r"(\d+) of \1 offsets, \S+ \S+/s, 0 s left", last)


def test_a_worker_that_fails_ends_the_replay_and_says_why(recording, probes, tmp_path):
    out = tmp_path / "o"
    with pytest.raises(ReplayError, match="the probes have changed since the replay began"):
        replay(order(recording, probes, out, workers=2), lambda *_: _changes(tmp_path))
    save_probe(tmp_path)
    run(recording, probes, out, workers=2)
    assert (out / "summary.json").exists()


@contextmanager
def _changes(folder):
    save_probe(folder, threshold=1.75)
    yield lambda: None
