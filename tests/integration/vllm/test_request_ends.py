"""A real vLLM under the worker's driver and publisher: however a request ends, nothing past its end is published.

The engine core is a process of its own and does not wait for its front end: a stop string is found, and an abort takes
effect, while further steps run. Where that must be certain, the test holds the front end up.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.unit.engine_worker.line import Line, new_ring, spec_point
from undercurrent.adapters.vllm.engine import VLLMEngine

MAX_LEN, START_S = 256, 240
PROMPT = tuple(range(40, 60))
GREEDY = {"temperature": 0.0, "ignore_eos": True}
HELD_UP_S = 0.4
STEPS_AHEAD = 30


class Held:
    """A line on a loop of its own thread, which a test may hold up."""

    def __init__(self, model):
        ring, point = new_ring(256, 64 << 20), spec_point()
        engine = VLLMEngine(
            str(model),
            engine_args={
                "dtype": "float32", "max_model_len": MAX_LEN, "block_size": 32, "max_num_seqs": 8,
                "max_num_batched_tokens": 48, "num_gpu_blocks_override": 80, "enable_prefix_caching": False,
            },
            points=(point,), ring=ring, check_plans=True,
        )  # fmt: skip
        self.line = Line(ring, engine, point, max_held_bytes=32 << 20)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._context = self.line.running()
        self.call(self._context.__aenter__())
        self._seen = 0

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_S)

    def play(self, script):
        """Run a script to the end of all requests, and check everything; return what it returned."""

        async def whole():
            result = await script(self.line)
            await self.line.idle(120)
            return result

        result = self.call(whole())
        # The engine tells its worker of the last ends with a step of its own.
        deadline = time.monotonic() + 20
        while any(stream.ended is None for stream in self.line.streams().values()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.line.check()
        return result

    def past_end(self):
        """Rows that were computed past an end since the last call."""
        before, self._seen = self._seen, self.line.past_end
        return self._seen - before

    def close(self):
        self.call(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def held(_environment, models):
    made = Held(models["llama"])
    try:
        yield made
    finally:
        made.close()


def hold_up(line, key):
    """A script's middle: some tokens are there, and then the front end stands still while the engine goes on."""

    async def wait():
        await line.until(lambda: len(line.tokens[key, 0]) > 1, 60)
        steps, deadline = line.ring.stats().steps, time.monotonic() + 6
        time.sleep(HELD_UP_S)
        # So far that every text that is looked for lies behind, however slow the machine is.
        while line.ring.stats().steps < steps + STEPS_AHEAD and time.monotonic() < deadline:
            time.sleep(0.02)

    return wait()


@pytest.fixture(scope="module")
def plain(held):
    """What some prompts are continued with: prompt, token ids and text of each."""

    async def script(line):
        prompts = [tuple(range(first, first + 20)) for first in range(40, 52)]
        keys = [line.start(f"plain-{p[0]}", prompt=p, max_tokens=100, **GREEDY) for p in prompts]
        await line.until(lambda: all((key, 0) in line.finals for key in keys), 120)
        return [(p, line.tokens[key, 0], line.text[key, 0]) for p, key in zip(prompts, keys, strict=True)]

    return held.play(script)


def three_letters(held, plain):
    """Return a prompt, where in its continuation three tokens are a letter each, these, and the text."""
    decode = held.line.engine.tokenizer.decode
    for prompt, token_ids, text in plain:
        letters = [decode([token]) for token in token_ids]
        for at in range(6, 80):
            three = "".join(letters[at : at + 3])
            alone = all(len(letter) == 1 for letter in letters[at : at + 3])
            if alone and three.isascii() and three.isprintable() and text.count(three) == 1:
                return prompt, at, three, text
    raise AssertionError("no continuation has three letters in a row")


def test_a_stop_string_of_three_tokens_ends_the_request_where_it_is_complete(held, plain):
    prompt, at, three, text = three_letters(held, plain)

    async def script(line):
        key = line.start("stop", prompt=prompt, max_tokens=200, stop=(three,), **GREEDY)
        await hold_up(line, key)
        await line.until(lambda: (key, 0) in line.finals, 60)
        return key

    held.past_end()
    key = held.play(script)
    # The text ends two tokens before the tokens do: those are real, and what was computed after them is not.
    assert held.line.text[key, 0] == text[: text.index(three)]
    assert held.line.finals[key, 0] == ("stop", len(prompt) + at + 3)
    assert len(held.line.streams()[key, 0].positions) == len(prompt) + at + 3
    assert held.past_end() > 0


def test_a_stop_token_and_a_limit_end_requests_in_the_engine(held, plain):
    _, token_ids, _ = plain[0]
    token = next(t for i, t in enumerate(token_ids) if i > 5 and t not in token_ids[:i])

    async def script(line):
        keys = [
            line.start("token", prompt=PROMPT, max_tokens=100, stop_token_ids=(token,), **GREEDY),
            line.start("one", prompt=PROMPT, max_tokens=1, **GREEDY),
            line.start("limit", prompt=PROMPT, max_tokens=33, **GREEDY),
            line.start("model", prompt=PROMPT, max_tokens=MAX_LEN - len(PROMPT), **GREEDY),
        ]
        await line.until(lambda: all((key, 0) in line.finals for key in keys), 120)
        return keys

    keys = held.play(script)
    ends = [held.line.finals[key, 0] for key in keys]
    assert ends == [
        ("stop", len(PROMPT) + token_ids.index(token) + 1),
        ("length", len(PROMPT) + 1),
        ("length", len(PROMPT) + 33),
        ("length", MAX_LEN),
    ]


def test_the_models_own_end_and_children_that_end_apart(held):
    async def script(line):
        keys = [line.start(f"eos-{number}", prompt=PROMPT, n=3, max_tokens=150, temperature=2.0) for number in range(6)]
        await line.until(lambda: all((key, index) in line.finals for key in keys for index in range(3)), 120)
        return keys

    keys = held.play(script)
    ends = [held.line.finals[key, index] for key in keys for index in range(3)]
    assert "stop" in {reason for reason, _ in ends}
    assert len({length for _, length in ends}) > 1


def test_aborts_at_any_moment_and_ids_that_are_used_again_at_once(held):
    async def script(line):
        for attempt in range(1, 13):
            key = line.start("again", attempt, prompt=[60 + attempt] * (3 + attempt), max_tokens=200, **GREEDY)
            if attempt % 3:
                await line.until(lambda key=key, attempt=attempt: len(line.tokens[key, 0]) >= attempt, 60)
            if attempt % 4 == 1:
                time.sleep(0.1)
            line.driver.abort(key)
            await line.until(lambda key=key: (key, 0) in line.finals, 60)
            line.driver.free(lambda _: False)

    held.past_end()
    held.play(script)
    assert held.past_end() > 0


def test_an_abort_that_meets_a_stop_ends_the_request_once_and_at_one_length(held, plain):
    _, token_ids, _ = plain[0]
    at = next(i for i, t in enumerate(token_ids) if i > 5 and t not in token_ids[:i])

    async def script(line):
        keys = []
        for number in range(8):
            key = line.start(
                f"meets-{number}", prompt=PROMPT, max_tokens=100, stop_token_ids=(token_ids[at],), **GREEDY
            )
            keys.append(key)
            await line.until(lambda key=key, least=number % 4: len(line.tokens[key, 0]) > least, 60)
            if number % 2:
                # Now the engine has stopped by itself, and its last word waits for the front end, which aborts first.
                time.sleep(HELD_UP_S)
            line.driver.abort(key)
            await line.until(lambda key=key: (key, 0) in line.finals, 60)
        return keys

    keys = held.play(script)
    whole = len(PROMPT) + at + 1
    ends = [held.line.finals[key, 0] for key in keys]
    assert {reason for reason, _ in ends} <= {"stop", "abort"}
    assert all(length == whole if reason == "stop" else len(PROMPT) < length <= whole for reason, length in ends)
    for key, (_, length) in zip(keys, ends, strict=True):
        assert len(held.line.streams()[key, 0].positions) <= length


def test_requests_that_are_aborted_while_they_wait_or_before_their_first_token(held):
    async def script(line):
        keys = [line.start(f"many-{number}", prompt=PROMPT, max_tokens=60, **GREEDY) for number in range(24)]
        # Eight run, the others wait; some of the aborts come before the engine has heard of the request.
        for key in keys[4::2]:
            line.driver.abort(key)
        await line.until(lambda: all((key, 0) in line.finals for key in keys), 120)
        return keys

    keys = held.play(script)
    reasons = [held.line.finals[key, 0][0] for key in keys]
    assert reasons[4::2] == ["abort"] * 10
    assert set(reasons[:4]) == set(reasons[5::2]) == {"length"}
    assert all(held.line.finals[key, 0][1] >= len(PROMPT) for key in keys)


def test_one_child_is_stopped_and_the_others_go_on(held):
    async def script(line):
        key = line.start("child", prompt=PROMPT, n=3, max_tokens=120, temperature=1.0, ignore_eos=True)
        await line.until(lambda: len(line.tokens[key, 1]) > 3, 60)
        line.driver.abort(key, 1)
        await line.until(lambda: all((key, index) in line.finals for index in range(3)), 120)
        return key

    key = held.play(script)
    assert [held.line.finals[key, index][0] for index in range(3)] == ["length", "abort", "length"]


def test_rows_wait_while_the_front_end_stands_still_and_none_is_lost(held):
    async def script(line):
        keys = [line.start(f"slow-{number}", prompt=PROMPT, max_tokens=100, **GREEDY) for number in range(8)]
        for _ in range(4):
            await hold_up(line, keys[0])
        await line.until(lambda: all((key, 0) in line.finals for key in keys), 120)

    held.line.held.clear()
    held.play(script)
    assert max(held.line.held) > 0
