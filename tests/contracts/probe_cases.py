"""Every built-in probe, small, over one made-up model: what the contract suites run on. A new one joins by a line."""

from __future__ import annotations

import numpy as np

from undercurrent.core import ProbeFactory, RequestContext, StreamFacts, default_registry, probe
from undercurrent.probes import (
    AttentionProbe,
    EnsembleProbe,
    LinearProbe,
    MahalanobisProbe,
    MeanDifferenceProbe,
    MlpProbe,
)

WIDTH, LAYERS, PROMPT_LEN = 8, (1, 3), 3
STREAM = StreamFacts(prompt_len=PROMPT_LEN, layers=LAYERS, width=WIDTH, tensor_type="residual_stream")
CONTEXT = RequestContext("r1", {}, None, STREAM)


def linear(aggregation, positions="all", threshold=1.5, **settings):
    made = LinearProbe.from_arrays(
        np.linspace(-1, 1, WIDTH), 0.1, layer=3, tensor_type="residual_stream", threshold=threshold,
        aggregation=aggregation, positions=positions, **settings,
    )  # fmt: skip
    return LinearProbe.factory(artefact=made.artefact)


def stored(cls, threshold, tensors, **settings):
    settings = {"layer": 3, "tensor_type": "residual_stream", "threshold": threshold} | settings
    return cls.factory(artefact=cls.from_tensors(tensors, **settings).artefact)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def moments(threshold, rank, **settings):
    spread = normal(5, WIDTH, WIDTH).astype(float)
    made = MahalanobisProbe.from_moments(
        normal(6, WIDTH), spread @ spread.T / WIDTH + np.eye(WIDTH), rank=rank, layer=3, tensor_type="residual_stream",
        threshold=threshold, **settings,
    )  # fmt: skip
    return MahalanobisProbe.factory(artefact=made.artefact)


def peak():
    made = probe("contract-peak", threshold=3.0)(lambda record: float(np.max(record.tensor)))
    default_registry.unregister("contract-peak")
    return ProbeFactory(made)


MLP = {"hidden.weight": normal(1, 5, WIDTH), "hidden.bias": normal(2, 5), "weight": normal(3, 1, 5), "bias": [0.5]}
MEANS = {"positive": normal(7, WIDTH) / 2, "negative": -normal(7, WIDTH) / 2}
ENSEMBLE = {"weight": normal(8, 2, WIDTH), "bias": [0.25, -0.5], "mix": [0.75, 0.5]}
ATTENTION = {"weight": normal(9, WIDTH), "query": normal(10, WIDTH), "bias": [0.1]}
SUPPORT = {"coherence": {"support": 2, "window": 3}}

BATCH_CASES = {
    "max": linear({"kind": "max"}),
    "k_of_n": linear({"kind": "k_of_n", "k": 2, "n": 4}),
    "mean": linear({"kind": "mean", "min_count": 2}),
    "ema": linear({"kind": "ema", "alpha": 0.3}),
    "cusum": linear({"kind": "cusum", "drift": 0.5}, threshold=2.0),
    "generated": linear({"kind": "max"}, "generated"),
    "prompt": linear({"kind": "ema", "alpha": 0.3}, "prompt"),
    "coherent": linear({"kind": "max"}, **SUPPORT),
    "coherent-cusum": linear({"kind": "cusum", "drift": 0.0}, "generated", 0.5, **SUPPORT),
    "mlp": stored(MlpProbe, 2.5, MLP),
    "mlp-ema": stored(MlpProbe, 1.5, MLP, aggregation={"kind": "ema", "alpha": 0.3}, positions="generated"),
    "mean-difference": stored(MeanDifferenceProbe, 1.5, MEANS),
    "mahalanobis": moments(5.0, 3),
    "mahalanobis-coherent": moments(4.35, WIDTH - 1, **SUPPORT),
    "ensemble": stored(EnsembleProbe, 4.5, ENSEMBLE, layers=[1, 3]),
    "ensemble-coherent": stored(EnsembleProbe, 2.0, ENSEMBLE, layers=[1, 3], **SUPPORT),
    "attention": stored(AttentionProbe, 2.5, ATTENTION, pool_min_count=2),
    "attention-mean": stored(
        AttentionProbe, 1.5, ATTENTION, aggregation={"kind": "mean", "min_count": 2}, positions="generated"
    ),
}
CASES = BATCH_CASES | {"function": peak()}


def counts_generated_alone(factory):
    artefact = factory.probe_kwargs.get("artefact")
    return artefact is not None and artefact.config.positions == "generated"
