"""Keys and values, what enters a layer, and the choice of experts: what vLLM computes is what `transformers` does.

Four requests of uneven length at once, their prompts in chunks beside the tokens of others. The same check must fail
when rows are shifted, heads or requests are swapped, or keys are those before the rotary embedding.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import ALL, LAYERS, point
from inprocess import Ask, Capturing
from parity import tensor_problems

from undercurrent.adapters.hf.oracle import HFOracle
from undercurrent.errors import CaptureError
from undercurrent.testing.tiny_models import build_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

WIDTH = 128
HEADS, HEAD_DIM = 2, 32
LENGTHS = (3, 40, 17, 90)
POINTS = (point("kv", "kv", ALL), point("entering", "layer_input", ALL))
EXPERTS = point("experts", "router_topk", ALL)
TOPK = {"mixtral": 2, "qwen2_moe": 3}
CONFIG = {
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 3},
    "gemma2": {"tie_word_embeddings": True},
}
# Gemma 2 scales its embedding before the first layer.
FAMILIES = ("llama", "qwen2", "gpt2", "gemma2", *TOPK)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family, **config):
        key = (family, *config.items())
        if key not in made:
            made[key] = build_tiny_model(family, tmp_path_factory.mktemp(family) / family, width=WIDTH, **config)
        return made[key]

    return folder


def prompts(seed=1):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, length).tolist() for length in LENGTHS]


class Captured:
    """What four requests gave, beside what it should be."""

    def __init__(self, family, folder):
        points = (*POINTS, EXPERTS) if family in TOPK else POINTS
        with Capturing(folder, points) as engine:
            runs = engine.run([Ask(f"r{n}", prompt, params={"max_tokens": 9}) for n, prompt in enumerate(prompts())])
            self.faults = list(engine.log.faults)
        self.oracle = HFOracle(folder)
        self.sequences = [runs[f"r{n}"].sequence for n in range(len(LENGTHS))]
        self.streams = [runs[f"r{n}"].streams for n in range(len(LENGTHS))]
        self.rows = [{name: tensors(stream) for name, stream in streams.items()} for streams in self.streams]
        self.truth = [truth_of(self.oracle, sequence) for sequence in self.sequences]


def tensors(stream):
    """The rows of a stream, [tokens, layers, *shape of a row]."""
    opened = stream.opened
    return np.stack(stream.rows).reshape(-1, len(opened.layers), *(opened.row_shape or (opened.width,)))


def truth_of(oracle, sequence, layers=LAYERS):
    computed = {"kv": oracle.keys_values(sequence), "entering": oracle.activations(sequence)["layer_input"]}
    experts = oracle.router_topk(sequence)
    if experts:
        computed["experts"] = np.stack([experts[layer] for layer in range(layers)], axis=1)
    return computed


@pytest.fixture(scope="module", params=FAMILIES)
def captured(request, folders):
    made = Captured(request.param, folders(request.param, **CONFIG.get(request.param, {})))
    made.family = request.param
    return made


def test_every_row_is_what_transformers_computes(captured):
    assert captured.faults == []
    for number, streams in enumerate(captured.streams):
        for name, stream in streams.items():
            assert stream.positions == list(range(len(captured.sequences[number]) - 1))
            assert stream.token_ids == captured.sequences[number][:-1]
            assert (stream.closed.reason, stream.losses) == ("finished", [])
            assert tensor_problems(name, captured.rows[number][name], stream.positions, captured.truth[number]) == []


def test_rows_have_the_shape_of_their_type(captured):
    heads = 4 if captured.family == "gpt2" else HEADS
    streams = captured.streams[0]
    assert streams["kv"].opened.row_shape == (2, heads, HEAD_DIM)
    assert (streams["entering"].opened.row_shape, streams["entering"].opened.width) == ((), WIDTH)
    if captured.family in TOPK:
        opened = streams["experts"].opened
        assert (opened.row_shape, opened.dtype) == ((2, TOPK[captured.family]), "float32")


def test_the_layer_s_input_is_the_embedding_and_then_what_the_layer_before_left(captured):
    sequence, rows = captured.sequences[1], captured.rows[1]["entering"]
    stream = captured.oracle.activations(sequence)["residual_stream"][: len(rows)]
    assert np.allclose(rows[:, 1:], stream[:, :-1], atol=1e-4)
    assert not np.allclose(rows[:, 0], stream[:, 0], atol=0.1)


def test_an_expert_s_id_is_a_whole_number_and_names_each_once(captured):
    for rows in captured.rows:
        if "experts" not in rows:
            continue
        ids = rows["experts"][..., 0, :]
        assert np.array_equal(ids, np.round(ids))
        assert ids.min() >= 0
        assert all(len(set(one)) == len(one) for one in ids.reshape(-1, ids.shape[-1]).tolist())
        # Of Mixtral the weights add up to one; of the others here they do not.
        sums = rows["experts"][..., 1, :].sum(-1)
        assert np.allclose(sums, 1.0, atol=1e-5) == (captured.family == "mixtral")


def spoilt(captured, name, change, number=1):
    rows = change(captured.rows[number][name].copy())
    return tensor_problems(name, rows, captured.streams[number][name].positions, captured.truth[number])


def test_control_rows_shifted_by_one_fail(captured):
    for name in captured.rows[1]:
        found = spoilt(captured, name, lambda rows: np.roll(rows, 1, axis=0))
        assert len(found) >= len(captured.rows[1][name]) // 2, name


def test_control_two_requests_swapped_fail(captured):
    for name in captured.rows[1]:
        count = len(captured.rows[2][name])
        found = spoilt(captured, name, lambda rows, n=name, c=count: np.concatenate([captured.rows[2][n], rows[c:]]))
        assert len(found) >= count // 2, name


def test_control_two_layers_swapped_fail(captured):
    for name in captured.rows[1]:
        found = spoilt(captured, name, lambda rows: rows[:, [0, 2, 1, 3]])
        assert len(found) >= len(captured.rows[1][name]) // 2, name


def test_control_heads_swapped_and_values_for_keys_fail(captured):
    count = len(captured.rows[1]["kv"])
    assert len(spoilt(captured, "kv", lambda rows: rows[:, :, :, ::-1])) == count
    assert len(spoilt(captured, "kv", lambda rows: rows[:, :, ::-1])) == count


def test_control_ids_and_weights_swapped_fail(captured):
    if captured.family in TOPK:
        assert len(spoilt(captured, "experts", lambda rows: rows[..., ::-1, :])) == len(captured.rows[1]["experts"])


def unrotated(oracle, sequence):
    """Keys as each layer projects them, before the rotary embedding, [tokens, layers, heads, head_dim]."""
    seen = {}
    handles = [
        layer.self_attn.k_proj.register_forward_hook(lambda _m, _a, out, n=n: seen.update({n: out[0].numpy().copy()}))
        for n, layer in enumerate(oracle._model.model.layers)
    ]
    with torch.inference_mode():
        oracle._model(torch.tensor([sequence]), use_cache=False)
    for handle in handles:
        handle.remove()
    return np.stack([seen[n].reshape(len(sequence), HEADS, HEAD_DIM) for n in range(LAYERS)], axis=1)


def test_control_keys_before_the_rotary_embedding_fail(captured):
    if captured.family == "gpt2":
        return
    plain = copy.deepcopy(captured.truth[1])
    plain["kv"][:, :, 0] = unrotated(captured.oracle, captured.sequences[1])
    positions = captured.streams[1]["kv"].positions
    # Position 0 is not rotated.
    assert tensor_problems("kv", captured.rows[1]["kv"], positions, plain) == positions[1:]


def test_a_cached_prefix_has_no_keys_and_values_and_says_so(folders):
    prompt = prompts()[3]
    with Capturing(folders("llama"), POINTS, enable_prefix_caching=True) as engine:
        first, again = (engine.run([Ask(name, prompt)])[name] for name in ("first", "again"))
    oracle = HFOracle(folders("llama"))
    assert first.streams["kv"].positions[0] == 0
    for name, stream in again.streams.items():
        assert stream.opened.cached_prefix == 64
        assert stream.positions == list(range(64, len(again.sequence) - 1))
        assert tensor_problems(name, tensors(stream), stream.positions, truth_of(oracle, again.sequence)) == []


def test_a_bfloat16_model_names_its_experts_exactly(folders):
    folder = folders("qwen2_moe", dtype="bfloat16", num_experts=300)
    with Capturing(folder, (EXPERTS, POINTS[0]), dtype="bfloat16") as engine:
        run = engine.run([Ask("r", prompts()[1])])["r"]
    rows = tensors(run.streams["experts"])
    assert (rows.dtype, run.streams["kv"].opened.dtype) == (np.float32, "bfloat16")
    ids = rows[..., 0, :]
    # What bfloat16 cannot hold: odd numbers above 256.
    assert np.array_equal(ids, np.round(ids))
    assert ((ids > 256) & (ids % 2 == 1)).any()
    assert ids.max() < 300


def test_points_may_come_while_the_engine_runs(folders):
    from undercurrent.adapters.vllm import compat

    with Capturing(folders("mixtral"), (), settings={"open_points": True}) as engine:
        engine.points = (*POINTS, EXPERTS)
        compat.runtime_of(engine.worker).set_points(engine.points)
        run = engine.run([Ask("r", prompts()[1])])["r"]
        compat.runtime_of(engine.worker).set_points([replace(EXPERTS, layers=(2,))])
    truth = truth_of(HFOracle(folders("mixtral")), run.sequence)
    for name, stream in run.streams.items():
        assert tensor_problems(name, tensors(stream), stream.positions, truth) == []
    assert set(run.streams) == {"kv", "entering", "experts"}


def test_what_is_not_understood_is_refused_by_name(folders, monkeypatch):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    with pytest.raises(CaptureError, match=r"point 'experts': tensor_type router_topk .* the model has no experts"):
        Capturing(folders("llama"), (EXPERTS,)).__enter__()
    monkeypatch.setattr(CPUAttentionBackend, "get_name", staticmethod(lambda: "HPC_ATTN"))
    with pytest.raises(CaptureError, match=r"layer 0 .* backend HPC_ATTN may be given keys that are not rotated yet"):
        Capturing(folders("llama"), POINTS).__enter__()
