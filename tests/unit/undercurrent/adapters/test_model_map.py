"""Parts of a model are found by its structure, or it is refused."""

from __future__ import annotations

import pytest
from torch import nn

from undercurrent.adapters.model_map import ModelMap
from undercurrent.errors import CaptureError

WIDTH, LAYERS = 16, 3


class Block(nn.Module):
    def __init__(self, width=WIDTH, **parts):
        super().__init__()
        for name in parts or ("self_attn", "mlp"):
            self.add_module(name, nn.Linear(width, width))


class Tower(nn.Module):
    def __init__(self, layers=LAYERS, width=WIDTH, norm="norm", block=Block):
        super().__init__()
        self.layers = nn.ModuleList(block(width) for _ in range(layers))
        self.add_module(norm, nn.LayerNorm(width))


class Pictures(nn.Module):
    """A vision tower as long and as wide as the text part."""

    def __init__(self, method):
        super().__init__()
        self.visual, self.language_model = Tower(), Tower()
        if method:
            setattr(self, method, lambda: self.language_model)


@pytest.mark.parametrize("norm", ["norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f"])
def test_the_layers_stand_beside_the_final_norm(norm):
    model = nn.Sequential(Tower(norm=norm))
    parts = ModelMap.of(model, LAYERS, WIDTH)
    assert parts.layers == tuple(model[0].layers)
    assert parts.final_norm is getattr(model[0], norm)


@pytest.mark.parametrize("method", ["get_language_model", "get_decoder"])
def test_the_search_starts_at_the_text_part(method):
    model = Pictures(method)
    assert ModelMap.of(model, LAYERS, WIDTH).layers == tuple(model.language_model.layers)


def test_a_model_that_does_not_say_what_its_text_part_is_is_refused():
    class Silent(Tower):
        def get_language_model(self):
            raise NotImplementedError("nothing is marked")

    with pytest.raises(CaptureError, match=r"Silent does not say which part .* nothing is marked"):
        ModelMap.of(Silent(), LAYERS, WIDTH)


def test_two_lists_that_fit_are_refused():
    with pytest.raises(CaptureError, match=r"Pictures: .* found: visual, language_model"):
        ModelMap.of(Pictures(None), LAYERS, WIDTH)


@pytest.mark.parametrize(("layers", "width"), [(LAYERS + 1, WIDTH), (LAYERS, WIDTH * 2)])
def test_another_length_or_width_is_refused(layers, width):
    with pytest.raises(CaptureError, match=f"a list of {layers} layers of width {width} .* found: none"):
        ModelMap.of(Tower(), layers, width)


def test_layers_that_do_not_work_on_the_hidden_size_are_refused():
    model = Tower()
    model.layers[1] = Block(width=WIDTH + 1)
    with pytest.raises(CaptureError, match="found: none"):
        ModelMap.of(model, LAYERS, WIDTH)


def test_a_width_tells_a_tower_of_the_same_length_apart():
    model = nn.ModuleDict({"visual": Tower(width=32), "text": Tower()})
    assert ModelMap.of(model, LAYERS, WIDTH).layers == tuple(model["text"].layers)


def test_layers_of_another_pipeline_stage_do_not_count_against_it():
    model = Tower()
    model.layers[2], model.norm = nn.Identity(), nn.Identity()
    assert len(ModelMap.of(model, LAYERS, WIDTH).layers) == LAYERS


@pytest.mark.parametrize(
    ("names", "attention", "mlp"),
    [
        (("self_attn", "mlp"), "self_attn", "mlp"),
        (("attn", "mlp"), "attn", "mlp"),
        (("self_attention", "mlp"), "self_attention", "mlp"),
        (("attention", "feed_forward"), "attention", "feed_forward"),
        (("self_attn", "block_sparse_moe"), "self_attn", "block_sparse_moe"),
        (("mamba", "feed_forward"), None, "feed_forward"),
        (("mixer",), None, None),
    ],
)
def test_parts_of_a_layer_are_found_or_refused_by_name(names, attention, mlp):
    model = Tower(block=lambda width: Block(width, **dict.fromkeys(names)))
    parts = ModelMap.of(model, LAYERS, WIDTH)
    for tensor_type, name in (("attn_out", attention), ("mlp_out", mlp)):
        if name is None:
            with pytest.raises(CaptureError, match=rf"layer 1 \(Block\) has no part that gives {tensor_type}"):
                parts.module(tensor_type, 1)
        else:
            assert parts.module(tensor_type, 1) is getattr(model.layers[1], name)
    assert parts.module("residual_stream", 1) is model.layers[1]
    assert parts.mixers(1) == [getattr(model.layers[1], names[0])]
