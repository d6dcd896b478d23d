"""What enters a layer, on small models that hand their stream on in every known way, and in some that are wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from undercurrent.adapters.model_map import FIRST, SUM, WHOLE, ModelMap
from undercurrent.adapters.vllm.entering import decide_inputs
from undercurrent.errors import CaptureError

WIDTH = 8


class Layer(nn.Module):
    """A decoder layer that is given h and r, and leaves its stream as their sum or, with a leftover, as h alone."""

    def __init__(self, returns):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.returns = returns

    def forward(self, positions, hidden_states, residual=None):
        alone = residual is None or self.returns == "leftover"
        stream = hidden_states.clone() if alone else hidden_states + residual
        out = self.linear(stream)
        # As fused norms do: what it was given is gone.
        hidden_states.zero_()
        if self.returns == "leftover":
            return stream + out, out
        return out, stream


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, layers, between=None, first=None):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.between, self.first = between, first

    def forward(self):
        h, r = torch.randn(5, WIDTH), self.first
        for number, layer in enumerate(self.layers):
            # Some are called by position, some by name.
            h, r = layer(None, h, r) if number % 2 else layer(positions=None, hidden_states=h, residual=r)
            if self.between is not None:
                h, r = self.between(h, r)
        return h


def decided(model, streams, layers=(0, 1, 2)):
    parts = ModelMap.of(model, 3, WIDTH)
    return decide_inputs(lambda: model(), parts, dict(enumerate(streams)), layers)


def three(returns="pair"):
    return [Layer(returns) for _ in range(3)]


def test_a_pair_is_added_up_and_the_first_layer_has_no_residual():
    assert decided(Model(three()), [SUM] * 3) == {0: FIRST, 1: SUM, 2: SUM}


def test_a_leftover_beside_the_stream_is_not_added():
    assert decided(Model(three("leftover")), [FIRST] * 3) == {0: FIRST, 1: FIRST, 2: FIRST}


def test_a_pair_that_the_model_adds_up_between_its_layers_enters_alone():
    model = Model(three(), between=lambda h, r: (h + r, None))
    assert decided(model, [SUM] * 3) == {0: FIRST, 1: FIRST, 2: FIRST}


def test_only_those_asked_for_are_looked_at_and_none_needs_no_run():
    assert decided(Model(three()), [SUM] * 3, (2,)) == {2: SUM}
    assert decide_inputs(lambda: pytest.fail("it ran"), ModelMap.of(Model(three()), 3, WIDTH), {}, ()) == {}


@pytest.mark.parametrize(
    ("model", "streams", "message"),
    [
        (Model(three(), between=lambda h, r: (h * 1.5, r)), [SUM] * 3, "layer 1 .Layer.: cannot tell which"),
        (Model(three(), between=lambda h, r: (h, torch.zeros_like(h))), [FIRST] * 3, "cannot tell which"),
        (Model(three(), first=torch.ones(5, WIDTH)), [SUM] * 3, "layer 0 .Layer. is the first, and was given a resid"),
    ],
    ids=["scaled between layers", "either would fit", "a residual at first"],
)
def test_what_cannot_be_told_is_refused_by_name(model, streams, message):
    with pytest.raises(CaptureError, match=message):
        decided(model, streams)


def test_a_layer_that_calls_its_input_otherwise_is_refused():
    model = Model([Other(), Other(), Other()])
    model.forward = lambda: model.layers[0](torch.ones(2, WIDTH))
    with pytest.raises(CaptureError, match=r"layer 0 \(Other\): layer_input is its argument hidden_states"):
        decided(model, [WHOLE] * 3, (0,))


def test_behind_a_layer_of_another_pipeline_stage_nothing_can_be_checked():
    model = Model(three())
    model.forward = lambda: model.layers[1](None, torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    with pytest.raises(
        CaptureError, match=r"first layer of a pipeline stage .* residual_stream of layer 0 is the same"
    ):
        decided(model, [], (1,))


def test_no_hook_stays():
    model = Model(three())
    decided(model, [SUM] * 3)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
