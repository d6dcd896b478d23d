"""The self-check on small models that return their stream in every way that is known, and in some that are wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from undercurrent.adapters.model_map import ModelMap, Source
from undercurrent.adapters.vllm.selfcheck import self_check
from undercurrent.adapters.vllm.tap import TapSet, Way
from undercurrent.capture.points import TapGroup
from undercurrent.errors import CaptureError

WIDTH, LAYERS, VOCAB, ROWS = 16, 3, 50, 32


@pytest.fixture(params=list(Way), ids=[way.name for way in Way], autouse=True)
def way(request, monkeypatch):
    """How taps copy: everything here holds for each of them."""
    monkeypatch.setattr(TapSet.__init__, "__kwdefaults__", {"way": request.param, "copying": None})
    return request.param


class Norm(nn.Module):
    """A norm that adds a residual first if it gets one, in place as fused kernels do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x, residual=None):
        if residual is not None:
            x += residual
            residual.copy_(x)
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed if residual is None else (normed, residual)


class Attention(nn.Module):
    """Without a cache its output is whatever the memory held."""

    def forward(self, x):
        return torch.full_like(x, float("nan"))


class Layer(nn.Module):
    """A decoder layer; `kind` says how it returns its stream."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.input_layernorm, self.post_norm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, h, r):
        if self.kind == "fused":
            h, r = (self.input_layernorm(h), h.clone()) if r is None else self.input_layernorm(h, r)
            h, r = self.post_norm(self.self_attn(h), r)
            return self.mlp(h), r
        stream = h + self.self_attn(self.input_layernorm(h))
        out = self.mlp(self.post_norm(stream))
        whole = stream + out
        return {"whole": whole, "summed": (whole, stream), "alone": (whole, None), "odd": (whole, stream, out)}[
            self.kind
        ]


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))
        self.norm = Norm()
        self.kind = kind

    def forward(self, ids):
        h, r = self.embed(ids).clone(), None
        for layer in self.layers:
            out = layer(h, r)
            h, r = (out, None) if isinstance(out, torch.Tensor) else (out[0], out[1])
            r = r if self.kind == "fused" else None
        return self.norm(h, r) if self.kind == "fused" else self.norm(h)


def build(kind, tensor_types=("residual_stream", "mlp_out", "attn_out", "final_norm"), dtype="float32"):
    torch.manual_seed(1)
    model = Model(kind)
    parts = ModelMap.of(model, LAYERS, WIDTH)
    groups = [
        TapGroup(
            tensor_type=t, layers=(LAYERS,) if t == "final_norm" else tuple(range(LAYERS)), dtype=dtype, width=WIDTH
        )
        for t in tensor_types
    ]
    options = {"max_rows": ROWS, "device": torch.device("cpu"), "max_tap_bytes": 1 << 20}
    return model, parts, TapSet(groups, parts, **options)


def check(model, parts, taps):
    return self_check(lambda ids: model(torch.from_numpy(ids).long()), taps, parts, VOCAB, ROWS)


@pytest.mark.parametrize(("kind", "mode"), [("fused", "h + r"), ("whole", "tensor"), ("summed", "h"), ("alone", "h")])
def test_the_stream_is_found_for_every_way_to_return_it(kind, mode):
    model, parts, taps = build(kind)
    assert check(model, parts, taps) == {"Layer": mode}


def test_a_pair_that_nothing_can_decide_is_refused():
    model, parts, taps = build("summed")
    model.norm.forward = lambda x, residual=None: torch.zeros_like(x)
    with pytest.raises(CaptureError, match=r"layer 2 \(Layer\): cannot tell"):
        check(model, parts, taps)


def test_an_unknown_shape_of_output_is_refused():
    with pytest.raises(CaptureError, match="neither a tensor nor a pair"):
        check(*build("odd"))


def test_a_layer_whose_output_is_changed_before_it_is_read_is_refused():
    model, parts, taps = build("whole")
    model.layers[1].register_forward_pre_hook(lambda _m, args: (args[0] * 2, args[1]), prepend=True)
    with pytest.raises(CaptureError, match=r"layer 0 .* does not read"):
        check(model, parts, taps)


def test_a_tap_that_does_not_fire_is_refused():
    model, parts, taps = build("fused", ("mlp_out",))
    taps.taps[1].source = Source(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"mlp_out of layer 1 .* did not fire"):
        check(model, parts, taps)


def test_a_tap_that_copies_something_else_is_refused(monkeypatch, way):
    model, parts, taps = build("fused", ("mlp_out",))
    taps.taps[0].index, taps.taps[1].index = 1, 0
    arm = taps.arm

    def arm_crossed(step, rows):
        arm(step, rows)
        if way is Way.HOST:
            taps._targets = [tap.out[:rows] for tap in reversed(taps.taps)]

    monkeypatch.setattr(taps, "arm", arm_crossed)
    with pytest.raises(CaptureError, match="copied something else"):
        check(model, parts, taps)


@pytest.mark.parametrize("kind", ["whole", "fused"])
def test_a_stream_that_is_wider_than_its_rows_is_refused_and_never_rounded(kind):
    reason = r"residual_stream of layer 0 \(Layer\) is float32 in a model of bfloat16: its rows would be rounded"
    with pytest.raises(CaptureError, match=reason):
        check(*build(kind, ("residual_stream",), dtype="bfloat16"))


def test_half_the_width_in_a_wide_buffer_is_exact():
    model, parts, taps = build("fused", ("mlp_out",))
    model.bfloat16()
    check(model, parts, taps)


def test_the_taps_stay_installed_and_the_model_is_as_it_was():
    model, parts, taps = build("fused")
    check(model, parts, taps)
    taps.remove()
    assert not any("forward" in module.__dict__ or module._forward_hooks for module in model.modules())


def test_a_model_without_one_clear_list_of_layers_is_refused():
    with pytest.raises(CaptureError, match="found: none"):
        ModelMap.of(Model("fused"), LAYERS + 1, WIDTH)
    twice = nn.Module()
    twice.a, twice.b = Model("fused"), Model("whole")
    with pytest.raises(CaptureError, match="found: a, b"):
        ModelMap.of(twice, LAYERS, WIDTH)
    bare = Model("fused")
    del bare.layers[1].mlp
    with pytest.raises(CaptureError, match="no part that gives mlp_out"):
        ModelMap.of(bare, LAYERS, WIDTH).module("mlp_out", 1)
