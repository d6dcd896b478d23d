"""What ends a running request, and what its deltas say."""

from __future__ import annotations

import asyncio

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from undercurrent.adapters.base import EngineRequest  # noqa: E402
from undercurrent.adapters.hf.running import Mailbox, Running  # noqa: E402
from undercurrent.errors import EngineDeadError  # noqa: E402
from undercurrent.protocol.messages import Sampling  # noqa: E402

EOS = 3


def logits(token):
    made = torch.zeros(256)
    made[token] = 1.0
    return made


def run(text, *, prompt=b"ab", max_model_len=100, **sampling):
    """Have a request generate bytes until it ends; return its deltas."""

    async def inside():
        request = EngineRequest(
            engine_id="r", prompt_token_ids=tuple(prompt), sampling=Sampling(temperature=0.0, **sampling)
        )
        return Running(
            request,
            0,
            decode=lambda ids: bytes(i for i in ids if i != EOS).decode(errors="replace"),
            eos=frozenset({EOS}),
            max_model_len=max_model_len,
            mailbox=Mailbox(),
        )

    running = asyncio.run(inside())
    deltas = []
    for token in text:
        running.computed += running.pending
        deltas.append(running.advance(logits(token)))
        if deltas[-1].finish_reason is not None:
            return deltas, running
    return deltas, running


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def test_it_ends_at_max_tokens_and_16_is_the_default():
    deltas, _ = run(b"x" * 50, max_tokens=4)
    assert ([d.token_ids for d in deltas], deltas[-1].finish_reason) == ([(120,)] * 4, "length")
    assert len(run(b"x" * 50)[0]) == 16


def test_it_ends_where_the_model_has_no_more_positions():
    deltas, _ = run(b"x" * 50, max_model_len=7)
    assert (len(deltas), deltas[-1].finish_reason) == (5, "length")


def test_the_end_of_text_is_a_token_without_text():
    deltas, _ = run([*b"hi", EOS, *b"no"])
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].token_ids) == ("hi", "stop", (EOS,))


def test_the_end_of_text_may_be_ignored_and_stop_tokens_still_count():
    deltas, _ = run([*b"hi", EOS, *b"no"], ignore_eos=True, max_tokens=5)
    assert (text_of(deltas), deltas[-1].finish_reason) == ("hino", "length")
    deltas, _ = run([*b"hi", EOS, *b"no"], ignore_eos=True, stop_token_ids=(ord("n"),))
    assert (text_of(deltas), deltas[-1].finish_reason) == ("hi", "stop")


def test_a_stop_string_is_no_part_of_the_text_but_its_tokens_were_generated():
    deltas, _ = run(b"one END two", stop=("END",))
    assert text_of(deltas) == "one "
    assert sum(len(d.token_ids) for d in deltas) == len("one END")
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("end", ["length", "stop", "abort"])
def test_what_was_held_back_for_a_stop_string_comes_with_the_end(end):
    deltas, running = run(
        [*b"one EN", *([EOS] if end == "stop" else [])], stop=("END",), max_tokens=6 + (end != "length")
    )
    if end == "abort":
        deltas.append(running.abort())
    assert (text_of(deltas), deltas[-1].finish_reason) == ("one EN", end)


def test_what_it_computes_next_is_the_prompt_in_chunks_and_then_the_last_token():
    _, running = run(b"", prompt=b"abcde")
    assert (running.pending, bytes(running.inputs(2))) == (5, b"ab")
    running.computed = 2
    assert (running.pending, bytes(running.inputs(3))) == (3, b"cde")
    running.computed = 5
    running.advance(logits(120))
    assert (running.pending, bytes(running.inputs(1))) == (1, b"x")


def test_a_mailbox_raises_what_ended_the_engine():
    async def inside():
        mailbox = Mailbox()
        mailbox.put(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError, match="gone"):
            await mailbox.get()

    asyncio.run(inside())


def test_a_mailbox_whose_loop_has_ended_takes_anything():
    async def inside():
        return Mailbox()

    asyncio.run(inside()).put(EngineDeadError("gone"))
