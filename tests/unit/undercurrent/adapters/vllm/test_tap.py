"""Taps on a small module: what is read of it, which rows are believed, and what never reaches the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.undercurrent.adapters.vllm.later_device import LaterDevice
from undercurrent.adapters.model_map import BESIDE, FIRST, SUM, WHOLE, Source
from undercurrent.adapters.vllm.tap import TapSet, Way
from undercurrent.adapters.vllm.tap_op import tap_op
from undercurrent.capture.points import TapGroup
from undercurrent.errors import CaptureError

WIDTH, ROWS = 4, 8


class Part(nn.Module):
    """Gives a pair, or one tensor; works in place on what it is given, as fused kernels do."""

    def __init__(self, single=False):
        super().__init__()
        self.single = single

    def forward(self, positions, h, r=None):
        h += 1
        return h if self.single else (h, h * 10 if r is None else r)


class Parts:
    """Stands for a model's map: every layer is this module, read in this way."""

    def __init__(self, *sources):
        self.sources = sources

    def source(self, tensor_type, layer):
        return self.sources[layer]


@pytest.fixture(params=list(Way), ids=[way.name for way in Way])
def way(request):
    return request.param


def taps_of(way, *sources, width=WIDTH, max_tap_bytes=1 << 20):
    group = TapGroup(tensor_type="mlp_out", layers=tuple(range(len(sources))), dtype="float32", width=width)
    taps = TapSet(
        [group], Parts(*sources), max_rows=ROWS, device=torch.device("cpu"), max_tap_bytes=max_tap_bytes, way=way
    )
    taps.install()
    return taps


def rows(taps, count, layer=0):
    ((group, data),) = taps.rows_as_bytes().items()
    return data.view(np.float32).reshape(ROWS, len(group.layers), group.width)[:count, layer]


def numbered(count, shape=(WIDTH,)):
    return torch.arange(count * int(np.prod(shape)), dtype=torch.float32).reshape(count, *shape)


@pytest.mark.parametrize(
    ("source", "want"),
    [
        (Source(Part(single=True), WHOLE), lambda h: h + 1),
        (Source(Part(), FIRST), lambda h: h + 1),
        (Source(Part(), SUM), lambda h: h + 1 + 10 * (h + 1)),
        (Source(Part(), FIRST, ("h",)), lambda h: h),
        (Source(Part(), SUM, ("h", "r")), lambda h: h),
    ],
    ids=["a tensor", "the first of a pair", "the sum", "an input", "a sum of inputs of which one is missing"],
)
def test_it_copies_what_its_source_says(way, source, want):
    taps = taps_of(way, source)
    taps.arm(7, 3)
    source.module(None, numbered(3))
    assert taps.stale(7, 3) == frozenset()
    assert np.array_equal(rows(taps, 3), want(numbered(3)).numpy())


def test_two_inputs_stand_side_by_side_whatever_their_shape(way):
    source = Source(Part(), BESIDE, ("h", "r"))
    taps = taps_of(way, source, width=2 * 6)
    h, r = numbered(3, (2, 3)), numbered(3, (2, 3)) * -1
    taps.arm(1, 3)
    source.module(None, h.clone(), r=r)
    assert taps.stale(1, 3) == frozenset()
    assert np.array_equal(rows(taps, 3), torch.cat([h.flatten(1), r.flatten(1)], 1).numpy())


@pytest.mark.parametrize("at", [FIRST, SUM])
def test_a_batch_of_one_before_the_rows_is_left_out(way, at):
    """Modules of transformers keep it."""
    module = Part()
    taps = taps_of(way, Source(module, at))
    plain = taps_of(way, Source(Part(), at))
    for taken, h in ((taps, numbered(3)[None]), (plain, numbered(3))):
        taken.arm(1, 3)
        taken.taps[0].module(None, h)
        assert taken.stale(1, 3) == frozenset()
    assert np.array_equal(rows(taps, 3), rows(plain, 3))


def test_several_batches_before_the_rows_are_not_believed(way):
    module = Part()
    taps = taps_of(way, Source(module))
    taps.arm(1, 3)
    module(None, torch.zeros(4, 3, WIDTH))
    assert taps.stale(1, 3)


def test_an_input_is_found_by_place_and_by_name(way):
    source = Source(Part(), SUM, ("h", "r"))
    taps = taps_of(way, source)
    for step, call in ((1, lambda m, h, r: m(None, h, r)), (2, lambda m, h, r: m(r=r, h=h, positions=None))):
        taps.arm(step, 2)
        call(source.module, numbered(2), numbered(2))
        assert taps.stale(step, 2) == frozenset()
        assert np.array_equal(rows(taps, 2), 2 * numbered(2).numpy())


def test_an_input_that_the_module_does_not_have_is_refused_by_name(way):
    with pytest.raises(CaptureError, match="Part has no input query"):
        taps_of(way, Source(Part(), FIRST, ("query",)))


def test_nothing_is_copied_between_steps(way):
    module = Part()
    taps = taps_of(way, Source(module))
    module(None, numbered(2) + 5)
    taps.arm(3, 2)
    taps.disarm()
    module(None, numbered(2) + 5)
    assert not rows(taps, ROWS).any()


@pytest.mark.parametrize("what", ["another step", "fewer rows", "another width", "another shape of the second"])
def test_a_tap_whose_rows_are_not_of_this_step_is_stale(way, what):
    module = Part()
    taps = taps_of(way, Source(module, SUM))
    taps.arm(1, 3)
    module(None, numbered(3))
    assert not taps.stale(1, 3)
    taps.arm(2, 3)
    match what:
        case "fewer rows":
            module(None, numbered(2))
        case "another width":
            module(None, numbered(3, (WIDTH + 1,)))
        case "another shape of the second" if way is Way.HOST:
            # torch itself refuses to add them, or to write their sum.
            module(None, numbered(3), torch.zeros(2, 3, WIDTH))
            with pytest.raises(CaptureError, match="a tap failed"):
                taps.stale(2, 3)
            return
        case "another shape of the second":
            module(None, numbered(3), torch.zeros(1, WIDTH))
    assert len(taps.stale(2, 3)) == 1


def test_more_rows_than_the_step_has_are_believed_of_a_graph_alone(way):
    module = Part()
    taps = taps_of(way, Source(module))
    taps.arm(1, 3)
    module(None, numbered(ROWS + 2) if way is Way.GRAPH else numbered(4))
    assert bool(taps.stale(1, 3)) is (way is Way.HOST)
    if way is Way.GRAPH:
        assert np.array_equal(rows(taps, ROWS), numbered(ROWS + 2)[:ROWS].numpy() + 1)


def test_a_tap_that_raises_is_said_after_the_forward_pass():
    class Odd(nn.Module):
        def forward(self, _positions, h):
            return h, "not a tensor"

    module = Odd()
    taps = taps_of(Way.HOST, Source(module, SUM))
    taps.arm(5, 2)
    module(None, numbered(2))
    with pytest.raises(CaptureError, match="a tap failed"):
        taps.stale(5, 2)


def test_two_sets_share_a_module_and_come_off_in_any_order(way):
    module = Part()
    first, second = taps_of(way, Source(module)), taps_of(way, Source(module))
    for taps in (first, second):
        taps.arm(1, 2)
    module(None, numbered(2))
    assert np.array_equal(rows(first, 2), rows(second, 2))
    before = rows(first, 2).copy()
    first.remove()
    second.arm(2, 2)
    module(None, numbered(2) + 9)
    assert np.array_equal(rows(second, 2), numbered(2).numpy() + 10)
    assert np.array_equal(rows(first, 2), before)
    second.remove()
    module(None, numbered(2))
    assert np.array_equal(rows(second, 2), numbered(2).numpy() + 10)


def test_too_large_taps_are_refused_with_what_to_do(way):
    with pytest.raises(CaptureError, match="max_tap_bytes"):
        taps_of(way, Source(Part()), max_tap_bytes=100)


def test_a_compiler_keeps_every_tap_and_the_stamp_of_each_step():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    taps = taps_of(Way.GRAPH, Source(module[0]), Source(module[1]), Source(module[2]))
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for step, count in ((1, 3), (2, 5), (3, 2)):
        x = torch.randn(count, WIDTH)
        taps.arm(step, count)
        out = compiled(x)
        assert taps.stale(step, count) == frozenset()
        assert np.array_equal(rows(taps, count, 2), out.numpy())
        assert np.array_equal(rows(taps, count, 1), rows(taps, count, 0).clip(min=0))
        assert np.allclose(rows(taps, count, 0), torch.nn.functional.linear(x, module[0].weight, module[0].bias))


def test_rows_of_a_device_are_those_of_the_step_when_stale_has_said_so():
    device, module = LaterDevice(), Part()
    group = TapGroup(tensor_type="mlp_out", layers=(0,), dtype="float32", width=WIDTH)
    options = {"max_rows": ROWS, "device": torch.device("cpu"), "max_tap_bytes": 1 << 20}
    taps = TapSet([group], Parts(Source(module)), way=Way.OP, copying=device, **options)
    taps.install()
    for step in (1, 2, 3):
        taps.arm(step, 3)
        if step != 2:
            module(None, numbered(3) + step)
        before = rows(taps, 3).copy()
        assert bool(taps.stale(step, 3)) is (step == 2)
        assert np.array_equal(rows(taps, 3), before if step == 2 else numbered(3).numpy() + step + 1)


@pytest.mark.parametrize("way", [Way.OP, Way.GRAPH], ids=["op", "graph"])
def test_a_step_that_was_forgotten_is_not_stamped_again(way):
    module = Part()
    taps = taps_of(way, Source(module))
    taps.arm(1, 3)
    module(None, numbered(3))
    taps.forget()
    module(None, numbered(3))
    assert len(taps.stale(1, 3)) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_cuda_graph_replays_the_taps_without_python():
    device = torch.device("cuda")
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to(device).requires_grad_(False)
    group = TapGroup(tensor_type="mlp_out", layers=(0, 1), dtype="float32", width=WIDTH)
    parts = Parts(Source(module[0]), Source(module[1]))
    taps = TapSet([group], parts, max_rows=ROWS, device=device, max_tap_bytes=1 << 20, way=Way.GRAPH)
    taps.install()
    x = torch.zeros(ROWS, WIDTH, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        module(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x)
    taps.remove()
    for step, count in ((1, 3), (2, ROWS), (3, 1)):
        x.copy_(torch.randn(ROWS, WIDTH))
        taps.arm(step, count)
        graph.replay()
        assert taps.stale(step, count) == frozenset()
        assert np.array_equal(rows(taps, count, 1), out[:count].cpu().numpy())
        assert np.array_equal(rows(taps, count, 1), rows(taps, count, 0).clip(min=0))
    taps.arm(4, 1)
    assert len(taps.stale(4, 1)) == 1
    taps.arm(5, 1)
    taps.forget()
    graph.replay()
    assert len(taps.stale(5, 1)) == 1


def test_the_op_declares_what_it_writes():
    schema = tap_op()._schema
    assert [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] == [
        "buffer",
        "stamps",
    ]
