"""What a vLLM configuration says of the engine that it makes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from undercurrent.adapters.base import EngineInfo
from undercurrent.adapters.fingerprint import model_fingerprint
from undercurrent.adapters.vllm.support import Combination

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Outline(NamedTuple):
    """What is known of an engine before it runs.

    Args:
        layers: decoder layers.
        width: hidden size.
        dtype: NumPy name of the model's element type.
        combination: of runner, compile mode, schedule and parallelism.
    """

    layers: int
    width: int
    dtype: str
    combination: Combination


def outline_of(config: VllmConfig) -> Outline:
    """Return what is known of an engine before it runs.

    Args:
        config: of the engine.
    """
    from undercurrent.adapters.vllm import compat

    layers, width, dtype = compat.model_shape(config)
    return Outline(layers, width, dtype, compat.combination_of(config, v2_runner=config.use_v2_model_runner))


async def info_of(config: VllmConfig, model: str, name: str, vllm_version: str) -> EngineInfo:
    """Return the facts about an engine.

    Args:
        config: of the engine.
        model: folder or name of the model.
        name: how the model is called.
        vllm_version: installed.
    """
    import torch

    from undercurrent.adapters.vllm import compat

    layers, width, dtype = compat.model_shape(config)
    folder = Path(model)
    fingerprint = await asyncio.to_thread(model_fingerprint, folder) if folder.is_dir() else ""
    return EngineInfo(
        model=name,
        model_fingerprint=fingerprint,
        dtype=dtype,
        layers=layers,
        width=width,
        max_model_len=config.model_config.max_model_len,
        versions={"vllm": vllm_version, "torch": torch.__version__},
        row_shapes=compat.row_shapes(config),
    )
