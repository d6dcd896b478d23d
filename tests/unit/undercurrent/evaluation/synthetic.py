"""Made-up traffic of which everything is known, with one fault at a time planted in it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from undercurrent.evaluation import Evidence, Options, Report, evaluate

WORDS = [
    f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ra", "so", "tu") for b in ("ban", "dor", "fel", "gim", "hus")
]


@dataclass(frozen=True)
class Traffic:
    """What `evaluate` takes."""

    scores: pd.Series
    labels: pd.Series
    groups: pd.Series
    requests: pd.DataFrame
    features: np.ndarray
    tokens: pd.DataFrame | None = None
    layers: pd.DataFrame | None = None
    split: pd.Series | None = None
    options: Options = field(default_factory=lambda: Options(rounds=200))

    def report(self, **options) -> Report:
        evidence = Evidence(requests=self.requests, features=self.features, tokens=self.tokens, layers=self.layers)
        return evaluate(
            self.scores,
            self.labels,
            groups=self.groups,
            split=self.split,
            evidence=evidence,
            options=replace(self.options, **options),
        )


def traffic(n: int = 3000, *, seed: int = 0, shift: float = 3.0) -> Traffic:
    """Clean traffic: users of four requests each, texts and lengths that tell nothing."""
    rng = np.random.default_rng(seed)
    ids = pd.Index([f"request-{number:05d}" for number in range(n)], name="request_id")
    labels = rng.random(n) < 0.3
    features = rng.normal(size=(n, 16))
    features[:, 0] += shift * labels
    requests = pd.DataFrame(
        {
            "prompt": [" ".join(rng.choice(WORDS, 25)) for _ in range(n)],
            "length": rng.integers(20, 400, size=n),
            "language": rng.choice(["de", "en", "fr"], n),
        },
        index=ids,
    )
    return Traffic(
        scores=pd.Series(features[:, 0], index=ids),
        labels=pd.Series(labels, index=ids),
        groups=pd.Series(rng.integers(n // 4, size=n).astype(str), index=ids),
        requests=requests,
        features=features,
    )


def with_tokens(made: Traffic, *, seed: int = 1) -> Traffic:
    """Token scores whose highest is the request's: a peak after the onset in a positive, anywhere in a negative."""
    rng = np.random.default_rng(seed)
    rows, onsets = [], []
    for name, score in made.scores.items():
        length = int(made.requests.loc[name, "length"])
        onset = int(rng.integers(0, length // 2))
        peak = min(length - 1, onset + int(rng.exponential(15))) if made.labels[name] else int(rng.integers(length))
        values = score - 3.0 - rng.exponential(1.0, size=length)
        values[peak] = score
        rows.append(
            pd.DataFrame(
                {
                    "request_id": name,
                    "token_pos": np.arange(length),
                    "score": values,
                    "token": [f"{word} " for word in rng.choice(WORDS, length)],
                }
            )
        )
        onsets.append(float(onset) if made.labels[name] else np.nan)
    return replace(made, tokens=pd.concat(rows, ignore_index=True), requests=made.requests.assign(onset=onsets))


def with_layers(made: Traffic, *, seed: int = 2) -> Traffic:
    """Out-of-fold scores of eight layers, best in the middle, at three kinds of positions."""
    rng = np.random.default_rng(seed)
    frames = [
        pd.DataFrame(
            {
                "request_id": made.scores.index,
                "layer": layer,
                "position": position,
                "score": rng.normal(size=len(made.scores))
                + made.labels.to_numpy() * 2.5 * np.exp(-(((layer - 4) / 3) ** 2)),
            }
        )
        for layer in range(8)
        for position in ("prompt", "first 32", "later")
    ]
    return replace(made, layers=pd.concat(frames, ignore_index=True))
