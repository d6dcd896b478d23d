"""How long a report takes, how large its page is, and how much memory it needs: made-up scores with groups and lengths.

    python -m benchmarks.evaluate [--requests 100000]

One request in twenty is positive, a user has four requests, 2,000 rounds of the bootstrap. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from undercurrent.evaluation import Evidence, Options, evaluate


def main() -> None:
    """Evaluate once, write the report, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    count = parser.parse_args().requests
    rng = np.random.default_rng(0)
    labels = rng.random(count) < 0.05
    scores = rng.normal(size=count) + 3 * labels
    users = rng.integers(count // 4, size=count)
    requests = pd.DataFrame({"length": rng.integers(20, 2000, count), "language": rng.choice(["de", "en"], count)})
    options = Options(threshold=2.5, prevalence=0.001, requests_per_day=1e6, slices=("language",))
    started = time.perf_counter()
    report = evaluate(scores, labels, groups=users, evidence=Evidence(requests=requests), options=options)
    evaluated = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report.write(Path(folder))
        size = (Path(folder) / "report.html").stat().st_size
    lines = Path("/proc/self/status").read_text().splitlines()
    peak_mib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    figures = {
        "requests": count,
        "evaluate_s": round(evaluated - started, 1),
        "write_s": round(time.perf_counter() - evaluated, 1),
        "page_mb": round(size / 1e6, 2),
        "peak_rss_mib": round(peak_mib),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
