"""Engines shared by the tests of this folder: one Llama, one GPT-2, small enough to start in seconds of work."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Tests look into the worker by sending it functions.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
ENGINE_ARGS = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 40}


@pytest.fixture(scope="session", autouse=True)
def _environment():
    before = {key: os.environ.get(key) for key in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    with warnings.catch_warnings():
        # vLLM's own imports warn; ours must not.
        warnings.simplefilter("ignore")
        import vllm.v1.engine.async_llm  # noqa: F401
    yield
    for key, value in before.items():
        if value is None:
            del os.environ[key]
        else:
            os.environ[key] = value


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    from undercurrent.testing.tiny_models import build_tiny_model

    folder = tmp_path_factory.mktemp("models")
    return {family: build_tiny_model(family, folder / family) for family in ("llama", "gpt2")}


@pytest.fixture(scope="session")
def engines(_environment, models):
    from harness import Harness, start_all

    made = {family: Harness(folder, **ENGINE_ARGS) for family, folder in models.items()}
    try:
        start_all(list(made.values()))
        yield made
    finally:
        for harness in made.values():
            harness.close()


@pytest.fixture(scope="session")
def llama(engines):
    return engines["llama"]


@pytest.fixture(scope="session")
def adapter(_environment, models):
    from undercurrent.adapters.vllm import VLLMEngineAdapter

    with VLLMEngineAdapter() as made:
        made.load_model(str(models["llama"]), dtype="float32", max_model_len=256, block_size=32, **ENGINE_ARGS)
        yield made
