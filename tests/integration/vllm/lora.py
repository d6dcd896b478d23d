"""LoRA adapters for a tiny Llama, and the same model with one merged into its weights: the oracle of its rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj")


def build_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Write an adapter in the layout of PEFT; return its folder."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    tensors = {}
    for name, weight in weights.items():
        if name.rsplit(".", 2)[-2] in TARGETS:
            stem = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator) * 0.3
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator) * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(TARGETS),
        "bias": "none",
        "base_model_name_or_path": str(model),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def build_merged(model: Path, adapter: Path, folder: Path) -> Path:
    """Write the model as it is with the adapter in its weights; return its folder."""
    shutil.copytree(model, folder)
    weights, deltas = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, weight in weights.items():
        stem = "base_model.model." + name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in deltas:
            delta = deltas[f"{stem}.lora_B.weight"] @ deltas[f"{stem}.lora_A.weight"]
            weights[name] = weight + (ALPHA / RANK) * delta.to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
