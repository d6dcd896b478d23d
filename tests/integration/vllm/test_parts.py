"""Which of vLLM's layers keys, values and routing are read from, and which are refused: on layers made for the test."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from undercurrent.adapters.model_map import BESIDE
from undercurrent.errors import CaptureError

pytestmark = pytest.mark.vllm

SHAPES = {"kv": (2, 4, 8), "router_topk": (2, 2)}


class Backend:
    name = "CPU_ATTN"

    @classmethod
    def get_name(cls):
        return cls.name


def attention(**changes):
    from vllm.model_executor.layers.attention.attention import Attention

    class Made(Attention):
        def __init__(self):
            nn.Module.__init__(self)

    layer = Made()
    values = {
        "attn_backend": Backend,
        "attn_type": "decoder",
        "num_kv_heads": 4,
        "head_size": 8,
        "head_size_v": 8,
        "kv_sharing_target_layer_name": None,
    }
    for name, value in (values | changes).items():
        setattr(layer, name, value)
    return layer


def experts(router=None, *, monolithic=False, dp_size=1):
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runner = MoERunner.__new__(MoERunner)
    nn.Module.__init__(runner)
    method = SimpleNamespace(is_monolithic=monolithic, supports_internal_mk=False)
    runner.router = router or CPURouter(top_k=2, global_num_experts=4)
    runner.routed_experts = SimpleNamespace(quant_method=method)
    runner.moe_config = SimpleNamespace(dp_size=dp_size, is_sequence_parallel=False)
    return runner


def source(kind, *children):
    from undercurrent.adapters.vllm.compat.parts import VLLMParts

    block = nn.Module()
    block.inner = nn.ModuleList(children)
    return VLLMParts((block,), nn.LayerNorm(4), SHAPES).source(kind, 0)


def test_keys_and_values_are_the_inputs_of_the_attention_layer():
    layer = attention()
    found = source("kv", nn.Linear(2, 2), layer)
    assert (found.module, found.at, found.inputs) == (layer, BESIDE, ("key", "value"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_type": "encoder_only"}, "its attention is encoder_only"),
        ({"kv_sharing_target_layer_name": "model.layers.3.attn"}, "keys and values of model.layers.3.attn"),
        ({"num_kv_heads": 2}, r"2 heads of 8 and 8, not \(4, 8\)"),
        ({"head_size_v": 4}, "4 heads of 8 and 4"),
        ({"attn_backend": type("Hpc", (Backend,), {"name": "HPC_ATTN"})}, "HPC_ATTN may be given keys that are not"),
    ],
)
def test_attention_whose_inputs_mean_something_else_is_refused(changes, message):
    with pytest.raises(CaptureError, match=f"layer 0 .Module.: kv is not captured: .*{message}"):
        source("kv", attention(**changes))


def test_attention_of_another_make_is_refused():
    class Rotating(type(attention())):
        def forward(self, query, key, value):
            return query

    own = Rotating()
    with pytest.raises(CaptureError, match="not read from an attention layer of type Rotating"):
        source("kv", own)
    with pytest.raises(CaptureError, match="from its one attention layer; found: none"):
        source("kv", nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="found: Made, Made"):
        source("kv", attention(), attention())


def test_a_choice_of_experts_passes_through_once_whoever_asks_first():
    runner = experts()
    found, again = source("router_topk", runner), source("router_topk", runner)
    assert found.module is again.module
    assert (found.at, found.inputs) == (BESIDE, ("ids", "weights"))
    seen = []
    found.module.register_forward_pre_hook(lambda _m, _a, given: seen.append(given), with_kwargs=True)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    weights, ids = runner.router.select_experts(torch.zeros(1, 4), logits)
    assert len(seen) == 1
    assert seen[0]["ids"] is ids
    assert seen[0]["weights"] is weights
    assert sorted(ids[0].tolist()) == [1, 3]


def test_routers_and_experts_that_decide_otherwise_are_refused():
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulatorRouter

    replicas = CPURouter(top_k=2, global_num_experts=4)
    replicas.eplb_state = object()
    for runner, message in (
        (experts(RoutingSimulatorRouter(top_k=2, global_num_experts=4)), "a router of type RoutingSimulatorRouter"),
        (experts(monolithic=True), "a kernel that chooses the experts itself"),
        (experts(dp_size=2), "gathered from several ranks"),
        (experts(replicas), "replicas"),
        (experts(CPURouter(top_k=3, global_num_experts=4)), "3 experts a token, not 2"),
    ):
        with pytest.raises(CaptureError, match=message):
            source("router_topk", runner)
    with pytest.raises(CaptureError, match="from its one set of experts; found: 0"):
        source("router_topk", nn.Linear(2, 2))


def config(*, parallel=(), passes=(), mode=None, **model):
    values = {
        "get_total_num_kv_heads": lambda: 4,
        "get_head_size": lambda: 8,
        "get_num_experts": lambda: 16,
        "get_num_experts_per_tok": lambda: 2,
        "use_mla": False,
        "is_attention_free": False,
        "hf_text_config": SimpleNamespace(model_type="mixtral"),
    }
    sizes = {"tensor_parallel_size": 1, "data_parallel_size": 1, "enable_eplb": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(**(values | model)),
        parallel_config=SimpleNamespace(**(sizes | dict(parallel))),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(**dict(passes)), mode=mode),
    )


def test_the_shapes_follow_from_the_configuration():
    from undercurrent.adapters.vllm.compat.parts import row_shapes

    assert row_shapes(config()) == SHAPES


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("kv", {"use_mla": True}, "latent attention"),
        ("kv", {"is_attention_free": True}, "no attention"),
        ("kv", {"parallel": {"tensor_parallel_size": 2}}, "each rank has heads of its own"),
        ("kv", {"hf_text_config": SimpleNamespace(model_type="mixtral", v_head_dim=4)}, "another size than its keys"),
        ("kv", {"passes": {"fuse_rope_kvcache": True}}, "rotated while the cache is written"),
        ("router_topk", {"get_num_experts": lambda: 0}, "the model has no experts"),
        ("router_topk", {"parallel": {"data_parallel_size": 2}}, "tokens of other ranks"),
        ("router_topk", {"parallel": {"enable_eplb": True}}, "replicas"),
        ("router_topk", {"hf_text_config": SimpleNamespace(model_type="phimoe")}, "experts of a phimoe"),
    ],
)
def test_a_setup_without_a_tensor_type_says_why(kind, changes, reason):
    from undercurrent.adapters.vllm.compat.parts import row_shapes, why_not

    made = config(**changes)
    assert kind not in row_shapes(made)
    assert reason in why_not(made, kind)


def test_the_choice_of_experts_in_a_compiled_model_is_refused():
    from vllm.config import CompilationMode

    from undercurrent.adapters.vllm.compat.parts import row_shapes, why_not

    made = config(mode=CompilationMode.VLLM_COMPILE)
    assert "set enforce_eager" in why_not(made, "router_topk")
    assert "router_topk" not in row_shapes(made)


@pytest.mark.parametrize("kind", ["residual_stream", "layer_input", "attn_out", "mlp_out"])
def test_a_stream_that_is_divided_by_a_factor_in_float16_is_refused(kind):
    from undercurrent.adapters.vllm.compat.parts import VLLMParts

    block = nn.Module()
    block.self_attn, block.mlp = nn.Linear(2, 2), nn.Linear(2, 2)
    parts = VLLMParts((block,), nn.LayerNorm(2), SHAPES)
    parts.source(kind, 0)
    block.routed_scaling_factor = 2.5
    parts.source(kind, 0)
    block.half()
    with pytest.raises(CaptureError, match=rf"layer 0 .Module.: {kind} is not captured in float16"):
        parts.source(kind, 0)
    assert parts.source("final_norm", 0).module is parts.final_norm
