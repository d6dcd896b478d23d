"""What a model is, as one hash: two engines with the same fingerprint computed with the same weights and tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from undercurrent.errors import ConfigError

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
_VOLATILE_KEYS = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})


def model_fingerprint(folder: Path) -> str:
    """Return the SHA-256 over configuration, weight files and tokenizer files of a model folder, hex.

    The configuration counts without paths and version stamps, so that a copy elsewhere has the same fingerprint.

    Args:
        folder: with `config.json`.

    Raises:
        ConfigError: there is no configuration, or it cannot be read.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"no model configuration in {folder}: {exc}") from exc
    total = hashlib.sha256()
    total.update(json.dumps(_stable(config), sort_keys=True, separators=(",", ":")).encode())
    for path in sorted({p for pattern in _WEIGHTS for p in folder.glob(pattern)} | _present(folder)):
        total.update(f"\n{path.name} {_sha256(path)}".encode())
    return total.hexdigest()


def _present(folder: Path) -> set[Path]:
    return {folder / name for name in _TOKENIZER if (folder / name).is_file()}


def _stable(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {key: _stable(part) for key, part in value.items() if key not in _VOLATILE_KEYS}
    return [_stable(part) for part in value] if isinstance(value, list) else value


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
