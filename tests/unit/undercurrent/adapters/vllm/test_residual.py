"""What is decided about layers that return their stream in every way that is known, and in ways that lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from undercurrent.adapters.model_map import ModelMap
from undercurrent.adapters.vllm.residual import decide
from undercurrent.errors import CaptureError

WIDTH, LAYERS, ROWS = 16, 3, 12


class Norm(nn.Module):
    """A norm that adds a residual first if it gets one, in place as fused kernels do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x, residual=None):
        if residual is not None:
            x += residual
            residual.copy_(x)
        normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x) * self.weight
        return normed if residual is None else (normed, residual)


class HandingOn(Norm):
    """Hands on the r that it is given, unread."""

    def forward(self, x, residual=None):
        return super().forward(x), residual


class Attention(nn.Module):
    """Without a cache its output is whatever the memory held."""

    def forward(self, x):
        return torch.full_like(x, float("nan"))


class Layer(nn.Module):
    """The stream is carried as the class says."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.self_attn, self.mlp = Attention(), nn.Linear(WIDTH, WIDTH)

    def block(self, stream):
        stream = stream + self.self_attn(self.norm1(stream))
        return stream, self.mlp(self.norm2(stream))


class Fused(Layer):
    def forward(self, h, r):
        h, r = (self.norm1(h), h.clone()) if r is None else self.norm1(h, r)
        h, r = self.norm2(self.self_attn(h), r)
        return self.mlp(h), r


class Summed(Layer):
    """Returns h added up, and what is left of r."""

    def forward(self, h, r):
        stream, out = self.block(h)
        return stream + out, stream


class PostNorm(Layer):
    """No norm comes first: what follows a layer is attention."""

    def forward(self, h, r):
        r = h + self.norm1(self.self_attn(h))
        return r + self.norm2(self.mlp(r)), r


class Parallel(Layer):
    def forward(self, h, r):
        normed = self.norm1(h)
        return h + self.self_attn(normed) + self.mlp(normed), None


class Whole(Layer):
    def forward(self, h, r):
        stream, out = self.block(h)
        return stream + out


class Idle(Layer):
    """Hands an r on that it does not read, for whoever reads it later."""

    def forward(self, h, r):
        stream, out = self.block(h)
        return stream + out, stream if r is None else r


class Scaled(Layer):
    """The stream is neither h nor h + r."""

    def forward(self, h, r):
        stream, out = self.block(h if r is None else h + 0.5 * r)
        return out, 2 * stream


class Both(Layer):
    """What follows reads h, and r for something else."""

    def forward(self, h, r):
        stream, out = self.block(h)
        return stream + out + (0 if r is None else 0.3 * r), stream


class Deaf(Layer):
    """Reads nothing of what it is given."""

    def forward(self, h, r):
        return torch.ones_like(h), torch.ones_like(h)


class Moody(Whole):
    """Computes something else each time."""

    def forward(self, h, r):
        return super().forward(h, r) * torch.rand(())


class Model(nn.Module):
    def __init__(self, *kinds, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.norm = Norm()
        self.to(dtype)

    def between(self, h, r):
        return h, r

    def forward(self):
        h, r = self.embed.clone(), None
        for layer in self.layers:
            out = layer(h, r)
            h, r = (out, None) if isinstance(out, torch.Tensor) else out
            h, r = self.between(h, r)
        if isinstance(self.norm, HandingOn):
            return self.norm(h, r)[0]
        return self.norm(h, r)[0] if isinstance(self.layers[-1], Fused) else self.norm(h)


def decision(model, layers=range(LAYERS)):
    return decide(model, ModelMap.of(model, len(model.layers), WIDTH), layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [(Fused, "h + r"), (Summed, "h"), (PostNorm, "h"), (Parallel, "h"), (Whole, "tensor")],
)
def test_every_honest_way_to_return_the_stream_is_told(kind, mode, dtype):
    assert decision(Model(*[kind] * LAYERS, dtype=dtype)) == dict.fromkeys(range(LAYERS), mode)


def test_what_the_final_norm_hands_on_beside_its_result_is_not_read():
    model = Model(*[Summed] * LAYERS)
    model.norm = HandingOn()
    assert set(decision(model).values()) == {"h"}


def test_what_a_layer_hands_on_may_be_read_later_so_it_is_refused():
    with pytest.raises(CaptureError, match=r"layer 0 \(Idle\): cannot tell which"):
        decision(Model(*[Idle] * LAYERS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_part_that_is_small_beside_the_other_does_not_hide(dtype, factor):
    """An r of a hundredth of h would not show in 16 bits, were it exchanged for noise of its own size."""
    model = Model(*[Fused] * LAYERS, dtype=dtype)
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp.weight *= factor
            layer.mlp.bias *= factor
    assert set(decision(model).values()) == {"h + r"}


def test_a_pair_that_the_model_adds_up_between_its_layers_is_a_sum():
    model = Model(*[Summed] * LAYERS)
    for layer in model.layers:
        layer.forward = lambda h, r, layer=layer: (layer.block(h)[1], layer.block(h)[0])
    model.between = lambda h, r: (h + r, None)
    assert set(decision(model).values()) == {"h + r"}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Scaled, "cannot tell which of its outputs"),
        (Both, "cannot tell which of its outputs"),
        (Deaf, "cannot tell that what follows it reads"),
        (Moody, "computes something else on the same input"),
    ],
)
def test_a_layer_that_lies_is_refused_by_name(kind, reason):
    with pytest.raises(CaptureError, match=rf"layer 0 \({kind.__name__}\): .*{reason}"):
        decision(Model(*[kind] * LAYERS))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h, r: (2 * h, r), "does not read what it returned"),
        (lambda h, r: (h, None if r is None else r + h), "reads something else"),
        (lambda h, r: (h, None if r is None else 2 * r), "reads something else"),
    ],
)
def test_a_stream_that_is_changed_between_layers_is_refused(change, reason):
    model = Model(*[Fused] * LAYERS)
    model.between = change
    with pytest.raises(CaptureError, match=rf"layer 0 \(Fused\): .*{reason}"):
        decision(model)


def test_a_stream_that_the_model_carries_beside_what_its_layers_return_is_refused():
    class Aside(Layer):
        def forward(self, h, r):
            return self.mlp(self.norm1(h + (0 if r is None else r)))

    model = Model(*[Aside] * LAYERS)
    carried = []
    model.between = lambda h, r: (h, carried.append(h) or sum(carried))
    with pytest.raises(CaptureError, match=r"layer 1 \(Aside\): .*reads something else"):
        decision(model, [1])


def test_what_every_layer_is_given_again_is_no_part_of_the_stream():
    class Reminded(Layer):
        def forward(self, h, r):
            stream, out = self.block(h if r is None else h + r)
            return stream + out - (0 if r is None else r)

    model = Model(*[Reminded] * LAYERS)
    model.between = lambda h, r: (h, model.embed)
    assert decision(model, [1]) == {1: "tensor"}


def test_what_a_layer_hands_on_must_be_what_it_returned_even_where_a_copy_goes_on():
    model = Model(*[Whole] * LAYERS)
    model.between = lambda h, r: (h.clone(), r)
    assert set(decision(model).values()) == {"tensor"}
    model.between = lambda h, r: (h.roll(1, 0), r)
    with pytest.raises(CaptureError, match="does not read"):
        decision(model)


def test_a_layer_that_runs_twice_has_no_one_value():
    model = Model(*[Whole] * LAYERS)
    shared = model.layers[1]
    model.layers[2].forward = lambda h, r: shared(h, r)
    assert decision(model, [0]) == {0: "tensor"}
    with pytest.raises(CaptureError, match=r"layer 1 \(Whole\) runs more than once"):
        decision(model, [1])


def test_a_layer_that_does_not_run_is_refused():
    model = Model(*[Whole] * LAYERS)
    model.forward = lambda: model.norm(model.layers[1](model.embed.clone(), None))
    with pytest.raises(CaptureError, match=r"layer 0 \(Whole\) did not run"):
        decision(model, [0])
    with pytest.raises(CaptureError, match=r"layer 1 \(Whole\): nothing in this process reads"):
        decision(model, [1])


def test_values_that_are_not_finite_are_refused():
    model = Model(*[Whole] * LAYERS)
    model.between = lambda h, r: (h, r)
    model.layers[0].mlp.weight.data.fill_(float("inf"))
    with pytest.raises(CaptureError, match=r"layer 0 .* not finite"):
        decision(model)


def test_different_layers_of_one_model_are_told_apart():
    assert decision(Model(Whole, Parallel, Whole)) == {0: "tensor", 1: "h", 2: "tensor"}


def test_the_last_layer_of_a_pipeline_stage_is_as_the_others_of_its_class():
    """Its follower is elsewhere: here stands something that has no parameters and does not run."""
    model = Model(*[Fused] * LAYERS)
    parts = ModelMap.of(model, LAYERS, WIDTH)
    stage = ModelMap((*parts.layers[:2], nn.Identity()), nn.Identity())

    def run():
        h, r = model.layers[0](model.embed.clone(), None)
        model.layers[1](h, r)

    assert decide(run, stage, [0, 1]) == {0: "h + r", 1: "h + r"}
    alone = ModelMap((model.layers[0], nn.Identity(), nn.Identity()), nn.Identity())
    with pytest.raises(CaptureError, match=r"layer 0 \(Fused\): nothing in this process reads"):
        decide(run, alone, [0])


def test_a_mixer_that_writes_into_what_it_is_given_is_silenced_too():
    class Mixer(nn.Module):
        def forward(self, x, output):
            output.fill_(float("nan"))

    class State(Layer):
        def __init__(self):
            super().__init__()
            del self.self_attn
            self.mixer = Mixer()

        def forward(self, h, r):
            h, r = (self.norm1(h), h.clone()) if r is None else self.norm1(h, r)
            out = torch.empty_like(h)
            self.mixer(h, out)
            return out, r

    model = Model(*[State] * LAYERS)
    model.layers[-1].__class__ = type("Last", (State, Fused), {"forward": State.forward})
    assert set(decision(model).values()) == {"h + r"}


def test_nothing_is_run_when_nothing_is_asked():
    def run():
        raise AssertionError

    assert decide(run, ModelMap((), nn.Identity()), []) == {}


def test_the_model_is_left_as_it_was():
    model = Model(*[Fused] * LAYERS)
    decision(model)
    assert not any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
