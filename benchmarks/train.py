"""How fast a probe is trained, and how much memory that takes: rows are made on the fly, as from a topic.

    python benchmarks/train.py [--kind logistic|mean-difference|lda] [--tokens 200000] [--width 4096]

One layer, one strength, one aggregation, so that every token is read once. The last line is one JSON object: MB/s of
bfloat16 rows as they would be stored, the peak of resident memory, and the bound that it had to stay under.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from undercurrent.evaluation.fit import Kind, LabelledRequest, Site, TrainSettings, train

SITE = Site("residual_stream", 0)
TOKENS_PER_REQUEST = 200
SHIFT = 0.5


@dataclass(frozen=True, slots=True)
class Requests:
    """Made-up requests: noise of scales far apart, and positives shifted along one axis.

    Args:
        first: number of the first.
        count: how many.
        width: elements of a row.
    """

    first: int
    count: int
    width: int

    def __iter__(self) -> Iterator[LabelledRequest]:
        scale = np.geomspace(0.1, 100, self.width).astype(np.float32)
        for number in range(self.first, self.first + self.count):
            rng, label = np.random.default_rng(number), number % 3 == 0
            rows = rng.standard_normal((TOKENS_PER_REQUEST, self.width), np.float32)
            rows[:, self.width // 2] += SHIFT * label
            rows *= scale
            positions = np.arange(TOKENS_PER_REQUEST)
            yield LabelledRequest(request_id=str(number), positions=positions, rows={SITE: rows}, label=label)


def _peak_mib() -> float:
    """Return the most memory that this process has held; the maximum of getrusage is inherited from its starter."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    """Train once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", type=Kind, default=Kind.LOGISTIC, choices=list(Kind))
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--memory-gib", type=float, default=4.0)
    options = parser.parse_args()
    settings = TrainSettings(
        kind=options.kind,
        strengths=options.kind.strengths[-1:],
        aggregations=[{"kind": "mean"}],
        memory_bytes=int(options.memory_gib * 2**30),
    )
    requests = options.tokens // TOKENS_PER_REQUEST
    started = time.perf_counter()
    made = train(
        Requests(0, requests, options.width), Requests(10**9, 100, options.width), settings, sites=[SITE]
    )  # fmt: skip
    seconds = time.perf_counter() - started
    peak = _peak_mib()
    stored = 2 * made.metrics["fit"]["tokens"] * options.width / 1e6
    figures = {
        "kind": options.kind.value,
        "tokens": made.metrics["fit"]["tokens"],
        "sampled_tokens": made.metrics["fit"]["sampled_tokens"],
        "width": options.width,
        "seconds": round(seconds, 1),
        "mb_per_s": round(stored / seconds, 1),
        "peak_rss_mib": round(peak),
        "memory_bound_mib": round(options.memory_gib * 1024),
        "auroc_threshold_split": round(made.metrics["threshold"]["auroc"], 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
