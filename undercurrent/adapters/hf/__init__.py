"""Models of `transformers`: an engine for machines without vLLM, its embedded adapter, and the oracle of parity tests.

Importing this package imports neither torch nor transformers; its names do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undercurrent.adapters.hf.adapter import HFEngineAdapter
    from undercurrent.adapters.hf.engine import HFEngine

__all__ = ["HFEngine", "HFEngineAdapter"]

_HOMES = {"HFEngine": "engine", "HFEngineAdapter": "adapter"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the language's own signature
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
