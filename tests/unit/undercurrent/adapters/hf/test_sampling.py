"""Logits to tokens."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from undercurrent.adapters.hf.sampling import Sampler, check_sampling  # noqa: E402
from undercurrent.errors import BadRequestError  # noqa: E402
from undercurrent.protocol.messages import Sampling  # noqa: E402

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, 2.5])
TRIES = 400


def drawn(logits=LOGITS, prompt=(), generated=(), index=0, **fields):
    sampler = Sampler(Sampling(**{"seed": 0, **fields}), index)
    return [sampler.choose(logits, prompt, generated) for _ in range(TRIES)]


def test_temperature_0_takes_the_greatest():
    assert set(drawn(temperature=0.0)) == {3}


def test_by_default_tokens_come_as_often_as_the_model_says():
    tokens = drawn()
    for token, chance in enumerate(LOGITS.softmax(-1).tolist()):
        spread = 4 * math.sqrt(chance * (1 - chance) / TRIES)
        assert abs(tokens.count(token) / TRIES - chance) < spread


def test_a_low_temperature_sharpens():
    assert drawn(temperature=0.3).count(3) > drawn(temperature=1.0).count(3) + 50


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, {3, 4}),
        ({"top_k": 1}, {3}),
        ({"top_k": -1}, {0, 1, 2, 3, 4}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.4}, {3}),
        ({"top_p": 0.7}, {3, 4}),
        ({"min_p": 0.9}, {3}),
        ({"min_p": 0.5}, {3, 4}),
        ({"min_p": 0.3}, {2, 3, 4}),
        ({"temperature": 3.0, "min_p": 0.6}, {2, 3, 4}),
    ],
)
def test_the_tail_that_is_cut_off_never_comes(fields, kept):
    assert set(drawn(**fields)) == kept


def test_a_repetition_penalty_counts_prompt_and_generated_alike():
    assert set(drawn(temperature=0.0, repetition_penalty=2.0, prompt=(3,))) == {4}
    assert set(drawn(temperature=0.0, repetition_penalty=2.0, prompt=(3,), generated=(4,))) == {2}


def test_a_presence_penalty_counts_generated_tokens_once():
    assert set(drawn(temperature=0.0, presence_penalty=0.6, prompt=(3,))) == {3}
    assert set(drawn(temperature=0.0, presence_penalty=0.6, generated=(3,))) == {4}
    assert set(drawn(temperature=0.0, presence_penalty=0.4, generated=(3, 3, 3))) == {3}


def test_a_frequency_penalty_counts_how_often():
    assert set(drawn(temperature=0.0, frequency_penalty=0.4, generated=(3,))) == {3}
    assert set(drawn(temperature=0.0, frequency_penalty=0.4, generated=(3, 3))) == {4}


def test_a_seed_repeats_and_children_differ():
    assert drawn(seed=7) == drawn(seed=7)
    assert drawn(seed=7) != drawn(seed=8)
    assert drawn(seed=7, index=1) == drawn(seed=8)
    assert drawn(seed=None) != drawn(seed=None)
    drawn(seed=-1), drawn(seed=(1 << 63) - 1, index=1)


def test_the_logits_are_left_as_they_are():
    before = LOGITS.clone()
    drawn(repetition_penalty=2.0, presence_penalty=1.0, prompt=(1,), generated=(2,), top_k=2, temperature=0.5)
    assert torch.equal(LOGITS, before)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 1.1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"max_tokens": 0},
        {"n": 0},
        {"seed": 1 << 63},
        {"temperature": "hot"},
        {"stop": ("",)},
        {"stop_token_ids": (5,)},
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields):
    with pytest.raises(BadRequestError, match=next(iter(fields)).replace("stop_token_ids", "stop token id")):
        check_sampling(Sampling(**fields), 5)


def test_what_makes_sense_is_not():
    check_sampling(Sampling(), 5)
    check_sampling(
        Sampling(temperature=0, top_p=1, top_k=-1, min_p=0, seed=-5, stop=("x",), stop_token_ids=(4,), n=2), 5
    )
