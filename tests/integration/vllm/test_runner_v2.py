"""The V2 model runner, for real, its kernels in Triton's interpreter: its rows are the rows of the same sequences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from every_point import STOP, Reference, expert_model, stops_met, wrong_rows
from lora import build_merged
from parity import problems
from scenarios import found_by

from undercurrent.adapters.hf.oracle import HFOracle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
SCHEDULES = ("", "async ")


@pytest.fixture(scope="module")
def found(models, tmp_path_factory):
    """Everything that ran on V2, by scenario."""
    environment = {"PYTHONPATH": str(HERE / "v2_on_cpu"), "UNDERCURRENT_V2_ON_CPU": "1"}
    return found_by("scenarios_v2.py", models["llama"], tmp_path_factory.mktemp("v2"), environment)


@pytest.fixture(scope="module")
def oracle(models):
    return HFOracle(models["llama"])


@pytest.fixture(scope="module")
def reference(found, models):
    with Reference.of(expert_model(models["llama"])) as made:
        yield made


def wrong(run, oracle):
    return problems(run.streams, run.sequence, len(run.prompt), oracle.activations(run.sequence))


def captured(scenario):
    return {name: run for name, run in scenario["runs"].items() if run.streams}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["mixed", "crowded"])
def test_rows_on_v2_match_transformers(found, oracle, schedule, kind):
    scenario = found[schedule + kind]
    assert scenario["runner"] == "vllm.v1.worker.cpu.model_runner.CPUModelRunner"
    assert (scenario["faults"], scenario["errors"]) == ([], 0)
    runs = captured(scenario)
    assert len(runs) == {"mixed": 5, "crowded": 4}[kind]
    for name, run in runs.items():
        assert wrong(run, oracle) == [], name
        assert {s.closed.reason for s in run.streams.values()} == {"finished"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_mixed_load_was_chunked_and_mixed(found, schedule):
    by_step = {}
    for name, run in captured(found[schedule + "mixed"]).items():
        stream = run.streams["residual"]
        for step, position in zip(stream.steps, stream.positions, strict=True):
            by_step.setdefault(step, {}).setdefault(name, []).append(position < len(run.prompt))
    assert any(len(rows) >= 3 for rows in by_step.values())
    assert any({True, False} <= {flag for rows in step.values() for flag in rows} for step in by_step.values())
    prefill = {step for step, rows in by_step.items() if True in rows.get("r3", ())}
    assert len(prefill) > 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_preempted_request_comes_as_a_new_one_and_is_opened_once(found, oracle, schedule):
    scenario = found[schedule + "crowded"]
    seen = scenario["seen"]
    assert seen["preempted"] > 0
    assert seen["again"] > 0
    assert seen["longer"] > 0
    for run in captured(scenario).values():
        assert run.streams["residual"].opened.prompt_len == len(run.prompt)
        assert run.streams["residual"].positions == list(range(len(run.sequence) - 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whatever_ends_a_request_no_row_lies_past_its_end(found, oracle, schedule):
    runs = captured(found[schedule + "stopped"])
    assert {name: run.finish_reasons.get(0) for name, run in runs.items()} == {
        "stop-token": "stop",
        "stop-token-too": "stop",
        "aborted": None,
        "one": "length",
        "aborted-in-prefill": None,
    }
    for name, run in runs.items():
        stream = run.streams["residual"]
        tokens = len(run.sequence)
        assert stream.positions == list(range(len(stream.positions)))
        if name.startswith("aborted"):
            # What the engine computed before it heard of the abort, of which the client may have seen less.
            assert stream.positions
        else:
            # A step that was under way when the last token came may have computed that token's own row.
            assert tokens - 1 <= len(stream.positions) <= tokens
            assert schedule or len(stream.positions) == tokens - 1
        same = min(tokens, len(stream.positions))
        assert stream.token_ids[:same] == run.sequence[:same]
        assert stream.closed.reason == "finished"


def test_one_more_step_of_a_request_that_stopped_gives_the_row_of_its_last_token(found):
    """Else the asynchronous schedule was never one step ahead, and the test above said little."""
    runs = found["async stopped"]["runs"]
    ahead = [n for n in ("stop-token", "stop-token-too") if _rows(runs[n]) == len(runs[n].sequence)]
    assert ahead == ["stop-token", "stop-token-too"]


def _rows(run):
    return len(run.streams["residual"].positions)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_tensor_selector_and_encoding_on_v2_is_that_of_v1(found, reference, schedule):
    scenario = found[schedule + "every"]
    assert (scenario["faults"], scenario["errors"]) == ([], 0)
    assert len(scenario["runs"]) == 8
    assert wrong_rows(scenario["runs"], scenario["points"], reference) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_generated_stop_token_ends_its_streams_on_v2_and_another_one_does_not(found, reference, schedule):
    """That each ends there and not elsewhere is in the test above; here, that there was one, and what it would say."""
    scenario = found[schedule + "every"]
    runs = {name: run for name, run in scenario["runs"].items() if name.startswith("stops-")}
    assert len(runs) == 2
    assert stops_met(runs) >= 1, "it was the first token each time"
    for run in runs.values():
        last = run.streams["experts_until"].positions[-1]
        assert len(run.prompt) <= last < len(run.sequence) - 2
        assert run.sequence[last] == STOP
    other = [
        replace(spec, until={"stop_token": STOP + 1}) if spec.until.stop_token is not None else spec
        for spec in scenario["points"]
    ]
    named = {spec.name for spec in scenario["points"] if spec.until.stop_token is not None}
    wrong = {line.split(":")[0] for line in wrong_rows(runs, other, reference)}
    assert (
        {f"{name}/experts_until" for name in runs} <= wrong <= {f"{name}/{point}" for name in runs for point in named}
    )


def test_control_what_the_requests_captured_is_not_what_another_one_did(found, reference):
    """Else the test above said little."""
    scenario = found["every"]
    runs = scenario["runs"]
    one, other = runs["e3"], runs["e4"]
    swapped = {"e3": replace(one, streams=other.streams), "e4": replace(other, streams=one.streams)}
    found_wrong = {line.split(":")[0] for line in wrong_rows(swapped, scenario["points"], reference)}
    assert found_wrong >= {
        f"{name}/{spec.name}" for name in swapped for spec in scenario["points"] if spec.name != "far"
    }


def test_an_idle_server_has_published_nothing(found, oracle):
    """Warm-up requests come through the same door as real ones."""
    warmed = found["warmed"]
    sent = warmed["idle"].pop("sent")
    assert any(name.startswith("_warmup_") for name in sent)
    assert any(name.startswith("_v2_mixed_warmup_") for name in sent)
    assert warmed["idle"] == {"steps": 0, "frames": 0, "faults": 0}
    for run in warmed["runs"].values():
        assert wrong(run, oracle) == []
    assert json.loads(warmed["report"])["residual_stream"] == {"LlamaDecoderLayer": "h + r"}


def test_prefixes_from_the_cache_are_declared_and_children_and_reused_ids_are_told_apart_on_v2(found, oracle):
    cached = found["cached"]
    again, twins = cached["again"]["again"], cached["again"]["twins"]
    assert wrong(cached["first"]["first"], oracle) == []
    assert again.streams["residual"].opened.cached_prefix == 64
    assert wrong(again, oracle) == []
    for index in (0, 1):
        sequence = [*twins.prompt, *twins.token_ids[index]]
        assert problems(twins.children[index], sequence, len(twins.prompt), oracle.activations(sequence)) == []
    assert twins.token_ids[0] != twins.token_ids[1]
    assert wrong(cached["reused"]["reused"], oracle) == []


def test_two_adapters_and_the_base_in_one_batch_on_v2(found, models, oracle, tmp_path):
    made, runs = found["adapters"]["adapters"], found["adapters"]["runs"]
    merged = {name: build_merged(models["llama"], path, tmp_path / name) for name, path in made.items()}
    for name, run in runs.items():
        assert {stream.opened.lora for stream in run.streams.values()} == {"" if name == "base" else name}
        assert wrong(run, HFOracle(merged[name]) if name in merged else oracle) == [], name
    assert wrong(runs["red"], oracle), "the adapter changes nothing: the test says nothing"
