"""Ranks that compare what their taps hold: what is equal passes, a part of a sum is refused on every rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from undercurrent.adapters.model_map import ModelMap
from undercurrent.adapters.vllm.equal_ranks import check_equal, told_of_all
from undercurrent.adapters.vllm.tap import TapSet
from undercurrent.capture.points import TapGroup
from undercurrent.errors import CaptureError

WIDTH, ROWS = 4, 6


class Ranks:
    """Threads that each play one rank; what one tells, all hear."""

    def __init__(self, count):
        self._barrier = threading.Barrier(count, timeout=20)
        self._told = {}

    def exchange_of(self, rank):
        def exchange(mine):
            self._told[rank] = mine
            self._barrier.wait()
            told = [self._told[number] for number in sorted(self._told)]
            self._barrier.wait()
            return told

        return exchange

    def run(self, work):
        """Return what `work(rank, exchange)` raised on each rank, None where it did not."""

        def one(rank):
            try:
                work(rank, self.exchange_of(rank))
            except CaptureError as exc:
                return str(exc)
            return None

        with ThreadPoolExecutor(self._barrier.parties) as pool:
            return list(pool.map(one, range(self._barrier.parties)))


class Kernel(torch.nn.Module):
    """Attention without a cache: its output is whatever stands in memory, another on each rank."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def forward(self, x):
        return torch.full_like(x, float(self.rank))


class Attention(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.kernel = Kernel(rank)

    def forward(self, x):
        return self.kernel(x)


class Layer(torch.nn.Module):
    """Its MLP gives the sum over the ranks, or this rank's part of it."""

    def __init__(self, rank, *, reduces):
        super().__init__()
        self.self_attn = Attention(rank)
        self.mlp = torch.nn.Linear(WIDTH, WIDTH)
        seed = torch.Generator().manual_seed(0 if reduces else rank)
        with torch.no_grad():
            for parameter in self.mlp.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=seed))

    def forward(self, x):
        return x + self.mlp(self.self_attn(x))


class Model(torch.nn.Module):
    def __init__(self, rank, reduces):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(rank, reduces=each) for each in reduces)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def checked(reduces, tensor_type, layers):
    def work(rank, exchange):
        model = Model(rank, reduces)
        group = TapGroup(tensor_type=tensor_type, layers=layers, dtype="float32", width=WIDTH)
        parts = ModelMap(tuple(model.layers), model.norm)
        taps = TapSet((group,), parts, max_rows=ROWS, device=torch.device("cpu"), max_tap_bytes=1 << 20)
        taps.install()
        ids = np.arange(ROWS, dtype=np.int32)
        kernels = [module for module in model.modules() if isinstance(module, Kernel)]
        check_equal(lambda ids: model(torch.ones(len(ids), WIDTH)), taps, ids, kernels, exchange)

    return Ranks(2).run(work)


@pytest.mark.parametrize(
    ("tensor_type", "layers"), [("attn_out", (0, 1)), ("mlp_out", (0, 1)), ("residual_stream", (1,))]
)
def test_what_every_rank_has_whole_passes(tensor_type, layers):
    assert checked((True, True), tensor_type, layers) == [None, None]


def test_a_part_of_a_sum_is_refused_by_name_on_both_ranks():
    first, second = checked((True, False), "mlp_out", (0, 1))
    assert first == second
    assert first.startswith("mlp_out of layer 1 (Linear) is not the same on every rank")


def test_what_one_rank_refuses_is_refused_on_all_and_none_waits():
    def work(rank, exchange):
        def refuse():
            if rank == 1:
                raise CaptureError("cannot")

        told_of_all(refuse, exchange)

    assert Ranks(3).run(work) == ["cannot"] * 3
