"""A fingerprint follows the model, not the place where it lies."""

from __future__ import annotations

import json

import pytest

from undercurrent.adapters.fingerprint import model_fingerprint
from undercurrent.errors import ConfigError


def write(folder, *, config=None, weights=b"weights", tokenizer="{}"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"hidden_size": 4, "_name_or_path": str(folder)}))
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "README.md").write_text(str(folder))
    return model_fingerprint(folder)


def test_a_copy_has_the_same_fingerprint(tmp_path):
    one = write(tmp_path / "a")
    assert one == write(tmp_path / "b")
    assert len(one) == 64
    reordered = {"_name_or_path": "elsewhere", "transformers_version": "9", "hidden_size": 4}
    assert one == write(tmp_path / "c", config=reordered)


@pytest.mark.parametrize(
    "change", [{"weights": b"other"}, {"tokenizer": "[]"}, {"config": {"hidden_size": 8}}], ids=lambda c: next(iter(c))
)
def test_what_matters_changes_it(tmp_path, change):
    assert write(tmp_path / "a") != write(tmp_path / "b", **change)


def test_a_folder_without_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no model configuration"):
        model_fingerprint(tmp_path)
