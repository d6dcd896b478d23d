"""Hooks copy rows where they belong, and say when they did not."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from undercurrent.adapters.hf.hooks import HookSet  # noqa: E402
from undercurrent.adapters.model_map import ModelMap  # noqa: E402
from undercurrent.capture.points import TapGroup  # noqa: E402
from undercurrent.errors import CaptureError  # noqa: E402

WIDTH = 4


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Identity()
        self.skips = False

    def forward(self, x):
        return (x + 1, None) if self.skips else (self.mlp(x) + 1, None)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer(), Layer()])
        self.norm = torch.nn.Identity()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return self.norm(x)


RESIDUAL = TapGroup(tensor_type="residual_stream", layers=(2, 0), dtype="float32", width=WIDTH)
MLP = TapGroup(tensor_type="mlp_out", layers=(1,), dtype="float32", width=WIDTH)


@pytest.fixture
def model():
    return Model()


def hooks_of(model, *groups, known=None):
    return HookSet(groups, ModelMap.of(model, 3, WIDTH), max_rows=8, known=known or {})


def rows(hooks, group):
    return hooks.rows_as_bytes()[group].view(np.float32).reshape(8, len(group.layers), WIDTH)


def test_each_pass_fills_the_rows_it_was_given_with_the_layers_in_the_order_of_the_group(model):
    hooks = hooks_of(model, RESIDUAL, MLP)
    for first, values in ((0, [[1.0] * 4, [2.0] * 4]), (2, [[7.0] * 4])):
        hooks.arm(first, len(values))
        model(torch.tensor([values]))
        assert hooks.disarm() is None
    assert rows(hooks, RESIDUAL)[:4, :, 0].tolist() == [[4, 2], [5, 3], [10, 8], [0, 0]]
    assert rows(hooks, MLP)[:3, 0, 0].tolist() == [2, 3, 8]


def test_what_enters_a_layer_is_copied_before_it_runs(model):
    group = TapGroup(tensor_type="layer_input", layers=(0, 2), dtype="float32", width=WIDTH)
    hooks = hooks_of(model, group)
    hooks.arm(0, 2)
    model(torch.tensor([[[1.0] * 4, [5.0] * 4]]))
    assert hooks.disarm() is None
    assert rows(hooks, group)[:2, :, 0].tolist() == [[1, 3], [5, 7]]


class Cache:
    def update(self, keys, values, layer, *_rest):
        return keys, values


KV = TapGroup(tensor_type="kv", layers=(2, 0), dtype="float32", width=8)


def test_keys_and_values_are_taken_as_a_layer_gives_them_its_cache(model):
    hooks, cache = hooks_of(model, KV), Cache()
    keys = torch.arange(8.0).reshape(1, 2, 2, 2)  # one text, two heads, two tokens, two elements
    hooks.arm(1, 2, cache)
    for layer in range(3):
        given = (keys + 100 * layer, keys + 100 * layer + 50)
        assert cache.update(*given, layer) == given
    assert hooks.disarm(cache) is None
    assert "update" not in vars(cache)
    found = hooks.rows_as_bytes()[KV].view(np.float32).reshape(8, 2, 2, 2, 2)
    # Token 1 of layer 2: its keys by head, then its values.
    assert found[2, 0].tolist() == [[[202, 203], [206, 207]], [[252, 253], [256, 257]]]
    assert found[1, 1, 0].tolist() == [[0, 1], [4, 5]]


def test_a_layer_that_gives_its_cache_nothing_or_another_shape_is_said(model):
    hooks, cache = hooks_of(model, KV), Cache()
    hooks.arm(0, 2, cache)
    cache.update(torch.ones(1, 2, 2, 2), torch.ones(1, 2, 2, 2), 0)
    assert hooks.disarm(cache) == "1 of 2 captured modules ran"
    hooks.arm(0, 2, cache)
    cache.update(torch.ones(1, 2, 2, 2), torch.ones(1, 2, 2, 3), 0)
    assert "not (2, 4) twice" in (hooks.disarm(cache) or "")


def test_nothing_is_copied_between_steps(model):
    hooks = hooks_of(model, RESIDUAL)
    model(torch.ones(1, 2, WIDTH))
    assert not rows(hooks, RESIDUAL).any()


def test_another_element_type_is_converted(model):
    group = TapGroup(tensor_type="final_norm", layers=(3,), dtype="float16", width=WIDTH)
    hooks = hooks_of(model, group)
    hooks.arm(0, 1)
    model(torch.ones(1, 1, WIDTH))
    assert hooks.rows_as_bytes()[group].view(np.float16)[0].tolist() == [4.0] * WIDTH


def test_a_module_that_did_not_run_is_said(model):
    hooks = hooks_of(model, RESIDUAL, MLP)
    hooks.arm(0, 1)
    model.layers[1].skips = True
    model(torch.ones(1, 1, WIDTH))
    assert hooks.disarm() == "2 of 3 captured modules ran"


def test_another_shape_is_said_and_does_not_reach_the_model(model):
    hooks = hooks_of(model, RESIDUAL)
    hooks.arm(0, 2)
    model(torch.ones(1, 1, WIDTH))
    assert "(1, 1, 4), not (1, 2, 4)" in (hooks.disarm() or "")


def test_buffers_that_are_known_are_kept_and_hooks_come_off(model):
    first = hooks_of(model, RESIDUAL)
    second = hooks_of(model, RESIDUAL, MLP, known=first.buffers)
    assert second.buffers[RESIDUAL] is first.buffers[RESIDUAL]
    first.remove()
    second.remove()
    second.arm(0, 1)
    model(torch.ones(1, 1, WIDTH))
    assert not rows(second, RESIDUAL).any()


def test_a_part_that_the_model_lacks_is_named_and_no_hook_stays(model):
    with pytest.raises(CaptureError, match="attn_out"):
        hooks_of(model, RESIDUAL, TapGroup(tensor_type="attn_out", layers=(0,), dtype="float32", width=WIDTH))
    assert not any(module._forward_hooks for module in model.modules())
