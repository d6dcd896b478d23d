"""Captured tensors are what transformers computes, family by family, in float32 and bfloat16; and every check can fail.

The truth is transformers in float32 on the same weights, which are stored as bfloat16: so it is one for both.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from harness import LAYERS, MAX_LEN, point
from inprocess import Ask, Capturing
from parity import BOUNDS, Finished, set_residual_mode, strangers

from undercurrent.adapters.hf.oracle import HFOracle
from undercurrent.adapters.vllm.support import MODELS, Status
from undercurrent.errors import CaptureError
from undercurrent.testing.tiny_models import FAMILIES, build_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

STREAMS = {
    "llama": ("LlamaDecoderLayer", "h + r"),
    "gpt2": ("GPT2Block", "tensor"),
    "qwen2": ("Qwen2DecoderLayer", "h + r"),
    "qwen3": ("Qwen3DecoderLayer", "h + r"),
    "gemma": ("GemmaDecoderLayer", "h + r"),
    "gemma2": ("Gemma2DecoderLayer", "h + r"),
    "gemma3": ("Gemma3DecoderLayer", "h + r"),
    "mixtral": ("MixtralDecoderLayer", "h + r"),
    "qwen2_moe": ("Qwen2MoeDecoderLayer", "h + r"),
    "phi3": ("LlamaDecoderLayer", "h + r"),
    "olmo2": ("Olmo2DecoderLayer", "tensor"),
    "cohere": ("CohereDecoderLayer", "h"),
    "exaone4": ("Exaone4DecoderLayer", "h"),
    "stablelm": ("StablelmDecoderLayer", "h"),
    "phimoe": ("PhiMoEDecoderLayer", "h"),
    "falcon": ("FalconDecoderLayer", "tensor"),
    "gpt_neox": ("GPTNeoXLayer", "tensor"),
    "smolvlm": ("LlamaDecoderLayer", "h + r"),
}
"""Every family that runs here: the class of its layers, and what of their output is the residual stream."""

NOT_COMPARED = ("mamba", "jamba", "lfm2", "qwen2_5_vl")
"""Families that vLLM does not run right in this setup, capture or no capture; the table of support says why."""

ENGINE_ARGS = {"smolvlm": {"limit_mm_per_prompt": {"image": 0}}}
WIDTH = 128
"""Twice that of other tests: a row's rounding in 16 bits is averaged over its elements."""

MODE_OF_ANOTHER = {"h + r": "h", "h": "h + r"}
LENGTHS = (3, 17, 40, 61, 90, 30)
GENERATED = (12, 20, 5, 16, 9, 14)
SHARED = 20
"""Tokens that the last prompt has in common with the one before."""


@dataclass(frozen=True)
class Case:
    """What one engine captured.

    Args:
        family: of its model.
        bounds: of its element type.
        points: that were captured.
        runs: all requests, with what transformers computes.
        misread: two requests that ran when the residual taps read the other of h and h + r; None where there is none.
        report: of the self-check: layer class and what the stream is.
    """

    family: str
    bounds: object
    points: tuple
    runs: tuple
    misread: tuple | None
    report: dict

    def problems(self, runs=None):
        return [line for run in runs or self.runs for line in run.problems(self.points, self.bounds)]


def prompts():
    generator = np.random.default_rng(1)
    made = [generator.integers(0, 256, length).tolist() for length in LENGTHS]
    made[-1][:SHARED] = made[-2][:SHARED]
    return made


def points_of(oracle):
    """Return a point on all of the four tensor types, in the layers that have it in transformers' model."""
    truth = oracle.activations(range(8))
    named = {"residual": "residual_stream", "attention": "attn_out", "mlp": "mlp_out"}
    layers = {kind: [n for n in range(LAYERS) if np.isfinite(truth[kind][:, n]).all()] for kind in named.values()}
    found = [point(name, kind, layers[kind]) for name, kind in named.items()]
    return (*found, point("norm", "final_norm", (LAYERS,)))


def ask_all(engine, oracle, prefix, count=None):
    asks = [
        Ask(f"{prefix}{i}", prompt, after=2 * i, params={"max_tokens": tokens, "temperature": 1.0})
        for i, (prompt, tokens) in enumerate(zip(prompts()[:count], GENERATED, strict=False))
    ]
    runs = engine.run(asks).values()
    return tuple(Finished(r.streams, r.sequence, len(r.prompt), oracle.activations(r.sequence)) for r in runs)


def know(folder):
    """Let vLLM look at a model's class in this process: on its own it starts another one, for 12 seconds."""
    from vllm import ModelRegistry

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    known = ModelRegistry.models[name]
    if hasattr(known, "module_name"):
        ModelRegistry.register_model(name, known.load_model_cls())


def eager_oracle(folder):
    """Return the oracle of a model, told not to compile: vLLM changes classes of transformers where it runs them."""
    oracle = HFOracle(folder)
    for module in oracle._model.modules():
        module.do_not_compile = True
    return oracle


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a family's folder and oracle, made before any engine of it runs: see `eager_oracle`."""
    made = {}

    def model(family):
        if family not in made:
            folder = tmp_path_factory.mktemp("model") / family
            build_tiny_model(family, folder, max_len=MAX_LEN, width=WIDTH, dtype="bfloat16")
            know(folder)
            made[family] = folder, eager_oracle(folder)
        return made[family]

    return model


@pytest.fixture(scope="module", params=[(f, d) for f in STREAMS for d in BOUNDS], ids="-".join)
def case(request, models):
    from undercurrent.adapters.vllm import compat

    family, dtype = request.param
    folder, oracle = models(family)
    points = points_of(oracle)
    with Capturing(folder, points, dtype=dtype, **ENGINE_ARGS.get(family, {})) as engine:
        runs = ask_all(engine, oracle, "parity")
        runtime = compat.runtime_of(engine.worker)
        other = MODE_OF_ANOTHER.get(STREAMS[family][1])
        misread = None
        if other is not None:
            set_residual_mode(runtime._taps, other)
            misread = ask_all(engine, oracle, "misread", count=2)
        return Case(family, BOUNDS[dtype], points, runs, misread, runtime.report["residual_stream"])


def test_every_row_is_what_transformers_computes(case):
    assert case.problems() == []
    assert all(len(p.layers) > 1 or p.name == "norm" for p in case.points)


def test_the_nearest_row_of_any_request_is_its_own(case):
    assert strangers(case.runs, case.points) == []


def test_the_stream_is_what_it_is_known_to_be(case):
    assert case.report == dict([STREAMS[case.family]])


def test_chunks_and_mixed_steps_happened(case):
    longest = case.runs[4].captured["residual"]
    assert len({s for s, p in zip(longest.steps, longest.positions, strict=True) if p < LENGTHS[4]}) > 1
    by_step = {}
    for number, run in enumerate(case.runs):
        for step in run.captured["residual"].steps:
            by_step.setdefault(step, set()).add(number)
    assert max(map(len, by_step.values())) >= 3


@pytest.mark.parametrize("name", ["residual", "attention", "mlp", "norm"])
def test_control_rows_shifted_by_one_fail(case, name):
    run = case.runs[3]
    stream = copy.copy(run.captured[name])
    stream.rows = stream.rows[1:] + stream.rows[:1]
    spoilt = replace(run, captured={**run.captured, name: stream})
    assert len(case.problems([spoilt])) >= LENGTHS[3] - 1
    mine = [p for p in case.points if p.name == name]
    others = [r for r in case.runs if r is not run]
    assert len(strangers([spoilt, *others], mine)) >= LENGTHS[3] - 1


def test_control_two_requests_swapped_fail(case):
    one, two = case.runs[2], case.runs[3]
    first, second = copy.copy(one.captured["residual"]), copy.copy(two.captured["residual"])
    rows = len(first.rows)
    first.rows, second.rows = second.rows[:rows], first.rows + second.rows[rows:]
    spoilt = [replace(one, captured={**one.captured, "residual": first})]
    spoilt.append(replace(two, captured={**two.captured, "residual": second}))
    assert len(case.problems(spoilt)) >= 2 * rows
    assert len(strangers(spoilt, case.points[:1])) >= 2 * rows


def test_control_the_other_of_h_and_h_plus_r_fails(case):
    if case.misread is None:
        assert set(case.report.values()) == {"tensor"}, "layers that return one tensor have no other"
        return
    found = case.problems(case.misread)
    rows = sum(len(run.sequence) - 1 for run in case.misread)
    assert sum(line.startswith("residual") for line in found) == rows
    assert not any(line.startswith(("attention", "mlp", "norm")) for line in found)


def test_the_streams_of_a_hybrid_are_decided_class_by_class(models):
    folder, _ = models("lfm2")
    with Capturing(folder, (point("residual", "residual_stream", tuple(range(LAYERS))),)) as engine:
        from undercurrent.adapters.vllm import compat

        found = compat.runtime_of(engine.worker).report["residual_stream"]
    assert found == {"Lfm2ShortConvDecoderLayer": "h + r", "Lfm2AttentionDecoderLayer": "h + r"}


def test_a_layer_without_attention_is_refused_by_name(models):
    folder, _ = models("lfm2")
    wanted = (point("attention", "attn_out", (0, 1)),)
    reason = r"layer 0 \(Lfm2ShortConvDecoderLayer\) has no part that gives attn_out"
    with pytest.raises(CaptureError, match=reason), Capturing(folder, wanted):
        pytest.fail("it started")


def test_every_family_that_is_built_is_run_or_has_its_reason():
    assert {*STREAMS, *NOT_COMPARED} == set(FAMILIES)
    counts = Counter(row.status for row in MODELS)
    assert counts == {Status.PASSED: len(STREAMS), Status.NOT_RUN: len(NOT_COMPARED)}
