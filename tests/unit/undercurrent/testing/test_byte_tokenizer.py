"""One token per byte."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

from undercurrent.testing import demo_model
from undercurrent.testing.byte_tokenizer import byte_tokenizer


def test_every_byte_is_a_token_and_comes_back():
    tokenizer = byte_tokenizer(512, after=("<eos>",), eos_token="<eos>", pad_token="<eos>")
    text = "any text, ä and 🜁 too"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert (max(ids) < 256, tokenizer.eos_token_id, len(tokenizer)) == (True, 256, 257)


def test_it_is_the_tokenizer_that_the_demos_model_was_trained_with(tmp_path):
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = byte_tokenizer(512, before=("<pad>", "<s>", "</s>"), start="<s>", **marks)
    tokenizer.save_pretrained(tmp_path)
    made, committed = (
        json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, demo_model.folder() / "model")
    )
    # Training has padded with it.
    assert {**made, "padding": None} == {**committed, "padding": None}
    assert tokenizer.encode("ab")[0] == tokenizer.bos_token_id == 1
