from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    BertConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3NextConfig,
    T5Config,
)

from undercurrent.cli.inspect_model import parse_layers, spans
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.errors import ConfigError

Captured = pytest.CaptureFixture[str]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FAMILIES: dict[str, tuple[Any, str, str, str]] = {
    "llama": (LlamaConfig(**SIZES), "model.layers.{layer}", "self_attn", "model.norm"),
    "qwen2": (Qwen2Config(**SIZES), "model.layers.{layer}", "self_attn", "model.norm"),
    "gemma": (GemmaConfig(**SIZES, head_dim=16), "model.layers.{layer}", "self_attn", "model.norm"),
    "gpt2": (
        GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=2),
        "transformer.h.{layer}",
        "attn",
        "transformer.ln_f",
    ),
}


def folder(tmp_path: Path, config: Any) -> Path:
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def inspected(capsys: Captured, *arguments: object) -> dict[str, Any]:
    assert run(app, PROG_NAME, ["inspect-model", *map(str, arguments), "--format", "json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_understood(family: str, tmp_path: Path, capsys: Captured) -> None:
    config, stack, attention, norm = FAMILIES[family]
    facts = inspected(capsys, folder(tmp_path, config), "--layers", "1,3")
    assert (facts["model_type"], facts["tested"], facts["layers"], facts["hidden_width"]) == (family, True, 4, 32)
    assert facts["dtype"] == "float32"
    assert facts["parameters"] > 0
    assert facts["record"] == {"layers": [1, 3], "bytes_per_token": 2 * 32 * 4 + 8}
    found = {tensor["tensor_type"]: (tensor["module"], tensor["layers"]) for tensor in facts["tensor_types"]}
    every = [0, 1, 2, 3]
    assert found == {
        "residual_stream": (stack, every),
        "attn_out": (f"{stack}.{attention}", every),
        "mlp_out": (f"{stack}.mlp", every),
        "kv": (f"{stack}.{attention}", every),
        "layer_input": (stack, every),
        "router_topk": (None, []),
        "final_norm": (norm, [4]),
    }
    assert all(tensor["meaning"] for tensor in facts["tensor_types"])


@pytest.mark.parametrize("family", FAMILIES)
def test_named_modules_are_those_that_the_model_has(family: str, tmp_path: Path, capsys: Captured) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = folder(tmp_path, FAMILIES[family][0])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    names = {name for name, _ in model.named_modules()}
    for tensor in inspected(capsys, path)["tensor_types"]:
        for layer in tensor["layers"]:
            assert tensor["module"].format(layer=layer) in names


def test_the_element_type_is_that_of_the_configuration(tmp_path: Path, capsys: Captured) -> None:
    facts = inspected(capsys, folder(tmp_path, LlamaConfig(**SIZES, dtype="bfloat16")))
    assert (facts["dtype"], facts["record"]) == ("bfloat16", {"layers": [2], "bytes_per_token": 32 * 2 + 8})


def test_a_hybrid_model_has_attention_in_some_layers(tmp_path: Path, capsys: Captured) -> None:
    hybrid = Qwen3NextConfig(
        num_hidden_layers=8, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    facts = inspected(capsys, folder(tmp_path, hybrid))
    found = {tensor["tensor_type"]: tensor["layers"] for tensor in facts["tensor_types"]}
    assert (found["attn_out"], found["mlp_out"], facts["tested"]) == ([3, 7], list(range(8)), False)


def test_a_person_gets_a_table(tmp_path: Path, capsys: Captured) -> None:
    path = folder(tmp_path, LlamaConfig(**SIZES))
    assert run(app, PROG_NAME, ["inspect-model", str(path)]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM (llama)" in out
    assert "4: 0 to 3; final_norm is layer 4" in out
    assert "136 bytes a token for layer 2" in out
    (row,) = (line for line in out.splitlines() if line.startswith("mlp_out"))
    assert row.split()[:3] == ["mlp_out", "0-3", "model.layers.{layer}.mlp"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            BertConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, is_decoder=True),
            "beside a final norm",
        ),
        (T5Config(num_layers=2, d_model=32), "T5Config"),
    ],
)
def test_another_architecture_is_a_clear_error(config: Any, says: str, tmp_path: Path, capsys: Captured) -> None:
    path = folder(tmp_path, config)
    assert run(app, PROG_NAME, ["inspect-model", str(path)]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"undercurrent: {path}: ")
    assert says in line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[1]", "holds a list; accepted: an object"),
        (b"{}", "its configuration cannot be read"),
        (b'{"model_type": "no-such-family"}', "no-such-family"),
        (b'{"model_type": "llama", "num_hidden_layers": "many"}', "num_hidden_layers"),
        (b"[" * 100_000, "is no JSON"),
    ],
)
def test_a_folder_without_a_configuration_is_one_line(
    content: bytes | None, says: str, tmp_path: Path, capsys: Captured
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert run(app, PROG_NAME, ["inspect-model", str(tmp_path)]) in (1, 2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"undercurrent: {tmp_path}")
    assert says in line


@pytest.mark.parametrize("model", ["/no/such/folder", "a/b/c", "", "../x y"])
def test_what_is_neither_folder_nor_name_is_refused_without_asking_a_hub(model: str, capsys: Captured) -> None:
    assert run(app, PROG_NAME, ["inspect-model", model]) == 2
    assert "accepted: a folder with config.json, or a name" in capsys.readouterr().err


def test_a_layer_that_is_not_there_is_refused(tmp_path: Path, capsys: Captured) -> None:
    path = folder(tmp_path, LlamaConfig(**SIZES))
    assert run(app, PROG_NAME, ["inspect-model", str(path), "--layers", "9"]) == 2
    assert "layer 9: the model has layers 0 to 3, final_norm 4" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "a", "1,,2", "-1", "1,1", "1;2", "9" * 20])
def test_layers_are_numbers_parted_by_commas(text: str) -> None:
    assert parse_layers(" 8, 12") == (8, 12)
    with pytest.raises(ConfigError, match="--layers"):
        parse_layers(text)


@pytest.mark.parametrize(("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7")])
def test_spans(numbers: tuple[int, ...], text: str) -> None:
    assert spans(numbers) == text
