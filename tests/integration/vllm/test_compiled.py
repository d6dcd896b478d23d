"""Capture where the model is compiled, with a cold and a warm cache: as a whole, as on a CPU, and split, as on a GPU.

Two processes one after the other, since a cache is warm only for a process that did not fill it. Each runs its engines
in turn; what they gave is looked at here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from undercurrent.testing.canaries import CANARY_ENVIRONMENT, found_canaries

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
"""Largest relative L2 distance of one row from the same model's without a compiler, fp32."""

COLD = ("eager", "vllm-untapped", "vllm-cold", "dynamo-cold")
WARM = ("vllm-warm", "dynamo-warm", "vllm-unnamed")
CAPTURED = ("eager", "vllm-cold", "dynamo-cold", "vllm-warm", "dynamo-warm")
COMPILED = CAPTURED[1:]


class Runs:
    """What each run said and gave, and what its process logged."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.log = ""
        environment = {
            **os.environ,
            **CANARY_ENVIRONMENT,
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_LOGGING_LEVEL": "DEBUG",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        for names in (COLD, WARM):
            asked = [
                {
                    "mode": name.partition("-")[0],
                    "model": str(model),
                    "out": str(folder / name),
                    "taps": name != "vllm-untapped",
                    "unnamed": name == "vllm-unnamed",
                }
                for name in names
            ]
            command = [sys.executable, str(Path(__file__).parent / "compiled_run.py"), json.dumps(asked)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
            self.log += done.stdout + done.stderr
            assert done.returncode == 0, self.log[-4000:]

    def said(self, name):
        return json.loads((self.folder / name / "said.json").read_text(encoding="utf-8"))

    def rows(self, name):
        return dict(np.load(self.folder / name / "rows.npz"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, models):
    return Runs(tmp_path_factory.mktemp("compiled"), models["llama"])


@pytest.mark.parametrize("name", CAPTURED)
def test_a_record_is_bit_for_bit_what_its_run_computed(runs, name):
    said = runs.said(name)
    assert said["differing"] == dict.fromkeys(said["differing"], 0)
    assert len(said["differing"]) == 6
    assert said["losses"] == 0


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_engine_computes_what_one_without_a_compiler_does(runs, name):
    said, eager, rows = runs.said(name), runs.said("eager"), runs.rows("eager")
    assert said["tokens"] == eager["tokens"]
    assert said["positions"] == eager["positions"]
    assert said["positions"]["chunked/residual"] == list(range(97))
    for key, found in runs.rows(name).items():
        wanted = rows[key].reshape(len(rows[key]), -1)
        distance = np.linalg.norm(found.reshape(wanted.shape) - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert distance.max() <= TOLERANCE, key


def test_an_engine_with_taps_has_a_compile_cache_of_its_own(runs):
    untapped, tapped = runs.said("vllm-untapped"), runs.said("vllm-cold")
    assert untapped["additional_config"] == {}
    assert untapped["cache"] != tapped["cache"]
    assert tapped["compiled"]["num_inductor_compiles"] > 0


def test_another_settings_file_and_ring_recompile_nothing(runs):
    compiled = runs.said("vllm-warm")["compiled"]
    assert compiled.pop("num_aot_artifacts_loaded") == 1
    assert compiled == dict.fromkeys(compiled, 0)


def test_what_is_hashed_and_logged_names_the_taps_alone(runs):
    cold, warm = runs.said("vllm-cold")["additional_config"], runs.said("vllm-warm")["additional_config"]
    assert cold == warm
    assert list(cold) == ["undercurrent"]
    assert list(cold["undercurrent"]) == ["taps"]
    assert "residual_stream/3/h + r/float32/64" in cold["undercurrent"]["taps"]
    assert str(runs.folder) not in str(cold)


def test_no_file_of_the_cache_and_no_line_of_the_log_holds_a_secret_or_says_where_the_settings_lie(runs):
    files = {str(path): path.read_bytes() for path in (runs.folder / "cache").rglob("*") if path.is_file()}
    files = {name: data for name, data in files.items() if data}
    assert any("computation_graph" in name for name in files)
    assert found_canaries({"log": runs.log, **files}) == []
    assert [name for name, data in files.items() if b"capture.json" in data] == []


def test_a_graph_from_the_cache_that_has_no_taps_is_refused(runs):
    assert "did not fire in the compiled model" in runs.said("vllm-unnamed")["refused"]


@pytest.mark.parametrize("name", COMPILED)
def test_the_report_says_what_the_taps_cost_and_that_they_are_in_the_graph(runs, name):
    report = runs.said(name)["report"]
    assert report["tap_bytes"] == 48 * 4 * (64 * (4 + 4 + 2 + 1 + 2) + 4 * 64)
    assert report["taps_in_graph"] is True
