"""Which layers a pipeline stage owns, and what is refused where they are not in their place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from undercurrent.adapters.model_map import ModelMap
from undercurrent.errors import CaptureError
from undercurrent.spec import TensorType

pytestmark = pytest.mark.vllm


def config(layers=5, stages=2):
    return SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: layers),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )


@pytest.fixture
def stage(monkeypatch):
    """Play a stage of two."""
    from undercurrent.adapters.vllm.compat import ranks

    def play(number):
        group = SimpleNamespace(rank_in_group=number, is_last_rank=number == 1, world_size=2)
        monkeypatch.setattr(ranks, "get_pp_group", lambda: group)
        monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0, world_size=1))
        return ranks

    return play


def parts(here, *, norm, layers=5):
    from vllm.model_executor.models.utils import PPMissingLayer

    modules = [nn.Linear(2, 2) if layer in here else PPMissingLayer() for layer in range(layers)]
    return ModelMap(tuple(modules), nn.LayerNorm(2) if norm else PPMissingLayer())


def test_every_layer_is_of_one_stage_and_the_norm_is_of_the_last(stage):
    first, last = stage(0).owned_layers(config())
    assert (*first, *last) == tuple(range(5))
    kinds = (TensorType.MLP_OUT, TensorType.FINAL_NORM)
    assert [tuple(stage(0).stage_layers(config(), kind)) for kind in kinds] == [tuple(first), ()]
    assert [tuple(stage(1).stage_layers(config(), kind)) for kind in kinds] == [tuple(last), (5,)]


def test_a_model_whose_layers_are_elsewhere_is_refused(stage):
    first, last = stage(0).owned_layers(config())
    stage(0).check_stage(parts(first, norm=False), config())
    stage(1).check_stage(parts(last, norm=True), config())
    # A Mixtral has a norm on every stage, and runs that of the last one.
    stage(0).check_stage(parts(first, norm=True), config())
    for number, here in ((0, (*first, last[0])), (0, first[1:]), (1, last[1:])):
        with pytest.raises(CaptureError, match=f"pipeline stage {number} has layers"):
            stage(number).check_stage(parts(here, norm=True), config())
    with pytest.raises(CaptureError, match="pipeline stage 1, the last one, has no final norm"):
        stage(1).check_stage(parts(last, norm=False), config())


def test_a_bare_server_with_stages_is_refused_by_name():
    from undercurrent.adapters.vllm import compat

    with pytest.raises(CaptureError, match="pipeline parallelism on a bare server"):
        compat.check_server(SimpleNamespace(vllm_config=config()))
    compat.check_server(SimpleNamespace(vllm_config=config(stages=1)))
