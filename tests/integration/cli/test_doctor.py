"""`undercurrent doctor` on a real engine: a healthy one, and what it says of arguments that do not go with capture."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def doctor(*arguments):
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "undercurrent.cli", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from undercurrent.testing.tiny_models import build_tiny_model

    return build_tiny_model("llama", tmp_path_factory.mktemp("doctor") / "llama")


def test_a_healthy_engine(model):
    settings = ("dtype=float32", "max_model_len=128", "num_gpu_blocks_override=80", "max_num_batched_tokens=64")
    done = doctor(model, "--format", "json", "--requests", 8, "--tokens", 12, *(f"--set={s}" for s in settings))
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["sound"]
    assert set(report["supported"].values()) == {""}
    assert report["parity_skipped"] == ""
    rows = sum(min(128 - 12 - 1, 3 + 7 * i) + 12 - 1 for i in range(8))
    for one in (*report["alone"].values(), *report["parity"].values()):
        assert (one["rows"], one["strangers"], one["problems"]) == (rows, 0, [])
    assert report["facts"]["residual_stream"] == {"LlamaDecoderLayer": "h + r"}
    assert report["facts"]["tap_bytes"] > 0
    assert report["cost"]["rows_dropped"] == 0
    assert 0 < report["cost"]["speed_with_capture"] < 2


def test_what_does_not_go_with_capture_is_named(model):
    done = doctor(model, "--set=data_parallel_size=2")
    assert done.returncode == 1
    assert "data parallelism" in done.stderr
    done = doctor(model, "--set=no_such_argument=1")
    assert done.returncode == 2
    assert "no_such_argument" in done.stderr
