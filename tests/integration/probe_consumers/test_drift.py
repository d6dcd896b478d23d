"""A probe host as a process tells when the traffic of its topic drifts."""

from __future__ import annotations

import re
import urllib.request

import numpy as np
import pytest

from tests.unit.probe_consumers.test_drift import THRESHOLD, reference_of, rows_of, stream_of
from undercurrent.probes import LinearProbe
from undercurrent.probes.drift import WINDOW_REQUESTS
from undercurrent.probes.folder import LinearArtefact, make_config
from undercurrent.testing.probe_bench import ProbeBench

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]


def test_a_perturbed_layer_raises_drift_and_traffic_as_before_does_not(embedded_broker, tmp_path):
    rng = np.random.default_rng(0)
    data = {"name": "guard", "version": "7", "layer": 0, "tensor_type": "residual_stream", "threshold": THRESHOLD}
    artefact = LinearArtefact(np.array([1, 0, 0, 0], np.float32), 0.0, make_config(data, "test"), reference_of(rng))
    with ProbeBench(embedded_broker.settings(), tmp_path, assignor=embedded_broker.assignors[-1]) as bench:
        LinearProbe(artefact).save(tmp_path / "guard")
        binding = {"name": "guard", "point": "residual", "probe": "./guard", "mode": "abort"}
        host = bench.start_host(bench.configure([binding]))

        def write(first, **change):
            values = [
                value for n in range(WINDOW_REQUESTS) for value in stream_of(f"r{first + n}", rows_of(rng, **change))
            ]
            bench.write(b"k", values, partition=0)

        def metrics():
            found = re.search(r"metrics and health at (http://\S+)", host.log.read_text())
            if found is None:
                return {}
            with urllib.request.urlopen(found[1] + "/metrics", timeout=5) as answer:  # noqa: S310 - our own server
                lines = re.findall(r"^undercurrent_probe_(drift\S*)\{(.*)\} (\S+)$", answer.read().decode(), re.M)
            told = {}
            for name, labels, value in lines:
                assert 'point="residual",probe="guard",version="7"' in labels
                figure = re.search(r'figure="(\w+)"', labels)
                told[name, figure[1] if figure else ""] = float(value)
            return told

        told = bench.wait(metrics, "metrics")
        assert np.isnan(told["drift", "psi"])
        assert np.isnan(told["drift_raised", ""])
        write(0)
        told = bench.wait(lambda: (m := metrics()).get(("drift_windows_total", "")) == 1 and m, "a window")
        assert told["drift_raised", ""] == 0, told
        assert 0 <= told["drift", "psi"] < told["drift_limit", "psi"]
        write(WINDOW_REQUESTS, scale=2.0)
        told = bench.wait(lambda: (m := metrics()).get(("drift_windows_total", "")) == 2 and m, "another window")
        assert told["drift", "norm_ratio"] == pytest.approx(2.0, rel=0.3)
        assert told["drift", "norm_ratio"] > told["drift_limit", "norm_ratio"]
        assert told["drift_raised", ""] >= 1
        assert re.search(r"guard 7: 500 requests have drifted: .*norm_ratio [12]", host.log.read_text())
        assert host.terminate() == 0, bench.logs()
