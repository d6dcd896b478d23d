"""The arguments of the engine of the kind hf."""

from __future__ import annotations

import logging

import pytest

from undercurrent.adapters.hf.options import HFOptions
from undercurrent.errors import ConfigError


def test_defaults_are_those_of_a_small_machine():
    options = HFOptions.of({})
    assert (options.dtype, options.device, options.max_num_seqs) == ("auto", "auto", 4)


def test_what_both_kinds_know_is_taken():
    options = HFOptions.of({"dtype": "half", "max_model_len": 512, "max_num_seqs": 2, "max_num_batched_tokens": 64})
    assert (options.dtype, options.max_model_len, options.max_num_seqs) == ("float16", 512, 2)


def test_what_tells_vllm_how_to_work_is_ignored_and_said(caplog):
    with caplog.at_level(logging.INFO):
        args = {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": 2**30}
        assert HFOptions.of(args) == HFOptions()
    assert "enable_chunked_prefill, enforce_eager, kv_cache_memory_bytes" in caplog.text


@pytest.mark.parametrize("name", ["tensor_parallel_size", "quantization", "enable_lora", "speculative_config"])
def test_what_would_change_the_outcome_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name}; accepted: .*max_num_seqs"):
        HFOptions.of({name: 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int8"),
        ("max_num_seqs", 0),
        ("max_model_len", "512"),
        ("max_num_batched_tokens", True),
        ("threads", -1),
    ],
)
def test_a_wrong_value_names_its_argument(name, value):
    with pytest.raises(ConfigError, match=f"engine argument {name} is"):
        HFOptions.of({name: value})
