"""Tiny models of every family that the engine of the kind hf is tested on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder of each family's model, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}
    from hf_bench import LAYERS, WIDTH

    from undercurrent.testing.tiny_models import build_tiny_model

    def model(family: str) -> Path:
        if family not in made:
            made[family] = build_tiny_model(family, folder / family, layers=LAYERS, width=WIDTH, max_len=256)
        return made[family]

    return model


@pytest.fixture(scope="session")
def llama(models):
    return models("llama")
