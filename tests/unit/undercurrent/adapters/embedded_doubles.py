"""An embedded adapter over the scripted engine, a probe that keeps what it saw, and how to run a request."""

from __future__ import annotations

import contextlib

import numpy as np

from undercurrent.adapters.embedded import EmbeddedAdapter
from undercurrent.core import Probe, ProbeAction, ProbeRegistry, ProbeResult, ProbeSignal
from undercurrent.router import Router
from undercurrent.spec import (
    ExtractionPoint,
    TensorType,
)
from undercurrent.testing.fake_engine import FakeEngine

LAYERS, WIDTH = 4, 16
PROMPT = "a prompt"


class Keeper(Probe):
    """Keeps what it saw, and stops at a position if told to."""

    def __init__(self, stop_at=None, wait=None):
        self.seen = []
        self.stop_at = stop_at
        self.wait = wait

    def on_activation(self, record):
        if self.wait is not None:
            assert self.wait.wait(10)
        self.seen.append((record.token_pos, record.layer, record.is_generated, np.asarray(record.tensor)))
        if record.token_pos == self.stop_at:
            return ProbeSignal(ProbeAction.ABORT, score=1.0, token_pos=record.token_pos)
        return ProbeSignal(score=0.0, token_pos=record.token_pos)

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, self.seen)


class Raiser(Keeper):
    def on_activation(self, record):
        raise ValueError("no")


class Adapter(EmbeddedAdapter):
    def __init__(self, **options):
        super().__init__(**options.pop("adapter", {}))
        self.options = options
        self.fake = None

    def _make_engine(self, model, ring, kwargs):
        self.fake = FakeEngine(
            open_points=True, ring=ring, layers=LAYERS, width=WIDTH, step_s=0.001, **self.options, **kwargs
        )
        return self.fake


def a_point(name="p", layers=(1,), position="generated[*]", **fields):
    fields = {"tensor_type": TensorType.RESIDUAL_STREAM, "probe_type": "keep", **fields}
    return ExtractionPoint(name=name, layers=layers, position=position, **fields)


@contextlib.contextmanager
def waiting_router(go):
    registry = ProbeRegistry()
    registry.register("keep", Keeper, {"wait": go})
    with Router(registry) as made:
        made.ended = {}
        made.on_request_end(made.ended.__setitem__)
        yield made


def run(adapter, router, request_id, *points, tokens=6, **kwargs):
    adapter.register_extraction(request_id, list(points))
    try:
        return adapter.generate(request_id, PROMPT, {"max_tokens": tokens, **kwargs}, router)
    finally:
        adapter.unregister_extraction(request_id)


def positions(router, request_id, name="p"):
    return [(position, layer) for position, layer, _, _ in router.ended[request_id][name].verdict]
