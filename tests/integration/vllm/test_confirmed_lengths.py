"""vLLM one step ahead of what it knows, and a driver that is late: rows leave when their tokens are known, or never.

The engine runs in this process with asynchronous scheduling, so each request that ends is computed for one step more.
The driver is a list of what `step` said, read some steps late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from inprocess import Ask
from scenarios import STOP, Ahead, prompts

from undercurrent.capture.holding import Holding
from undercurrent.capture.lengths import LengthTable
from undercurrent.testing.ring_log import RingLog

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class Told(Ahead):
    """An engine whose ring is read by what its driver has said of lengths."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.table = LengthTable(self.ring.lengths)
        self.holding = Holding(self.ring.lengths, max_bytes=64 << 20)
        self.log = RingLog(self.ring.reader(), self.holding)
        self.lag, self._said, self._slots, self.steps, self.longest_wait = 0, deque(), {}, 0, 0

    def add(self, ask):
        n = ask.params.get("n", 1)
        slot = self.table.take(n)
        self._slots[ask.name] = (slot, n, len(ask.prompt))
        super().add(replace(ask, order={**ask.order, "slot": slot}))

    def _note(self, run, output):
        super()._note(run, output)
        for child in output.outputs:
            said = (output.request_id, child.index, len(child.token_ids), child.finish_reason is not None)
            self._said.append((self.steps + self.lag, *said))

    def play(self, asks, lag):
        """Run requests under a driver that is some steps late; return what became of them, and their lengths."""
        self.lag = lag
        runs = self.run(asks, each_step=self._step)
        self.steps += lag + 1
        self._hear()
        lengths = {}
        for ask in asks:
            slot, n, prompt_len = self._slots[ask.name]
            for index in range(n):
                length = lengths[ask.name, index] = prompt_len + len(runs[ask.name].token_ids.get(index, ()))
                # Of an abort the engine says nothing more; the driver ends what it has counted.
                self.table.tell(slot, index, length, final=True)
            self.table.free(slot, n)
        self.log.read()
        return runs, lengths

    def _step(self, _):
        self.steps += 1
        self.longest_wait = max(self.longest_wait, self.holding.waiting)
        self._hear()

    def _hear(self):
        while self._said and self._said[0][0] <= self.steps:
            _, name, index, tokens, final = self._said.popleft()
            slot, _, prompt_len = self._slots[name]
            self.table.tell(slot, index, prompt_len + tokens, final=final)


@pytest.fixture(scope="module")
def told(models):
    with Told(models["llama"]) as engine:
        yield engine


@pytest.fixture(scope="module")
def stop(told):
    """A prompt, three letters of its continuation that are a token each, and their place."""
    asks = [Ask(f"plain-{i}", p, points=(), params={"max_tokens": 60}) for i, p in enumerate(prompts(8, *[12] * 12))]
    decode = told.engine.get_tokenizer().decode
    for run in told.run(asks).values():
        letters = [decode([token]) for token in run.token_ids[0]]
        for at in range(6, 50):
            three = "".join(letters[at : at + 3])
            alone = all(len(letter) == 1 for letter in letters[at : at + 3])
            if alone and three.isascii() and three.isprintable() and run.text[0].count(three) == 1:
                return run.prompt, three, at
    raise AssertionError("no continuation has three letters in a row")


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_every_row_before_an_end_leaves_and_none_after_it(told, stop, lag):
    prompt, three, at = stop
    a, b, c, d = prompts(4, 9, 14, 40, 100)
    name = lambda text: f"{text}-{lag}"  # noqa: E731 - four words
    asks = [
        Ask(name("in-prefill"), d, params={"max_tokens": 9}, abort_after=2),
        Ask(name("string"), prompt, params={"max_tokens": 60, "stop": [three]}),
        Ask(name("included"), prompt, params={"max_tokens": 60, "stop": [three], "include_stop_str_in_output": True}),
        Ask(name("token"), a, params={"max_tokens": 40, "stop_token_ids": STOP}),
        Ask(name("limit"), b, params={"max_tokens": 17}),
        Ask(name("one"), b, params={"max_tokens": 1}),
        Ask(name("children"), b, params={"max_tokens": 40, "n": 2, "temperature": 2.0, "ignore_eos": False}),
        Ask(name("aborted"), c, params={"max_tokens": 60}, abort_after=9),
        Ask(name("unstarted"), d, params={"max_tokens": 9}, abort_after=1),
    ]
    told.longest_wait = 0
    runs, lengths = told.play(asks, lag)
    for text in ("string", "included"):
        assert lengths[name(text), 0] == len(prompt) + at + 3
        # Two tokens more than the text, or as many.
        assert runs[name(text)].text[0].endswith(three) == (text == "included")
    for (request, index), length in lengths.items():
        run = runs[request]
        sequence = [*run.prompt, *run.token_ids.get(index, ())]
        stream = run.children[index]["residual"] if run.children else None
        if stream is None:
            # Aborted before its first step, it has no stream at all.
            assert request == name("unstarted")
            continue
        assert stream.positions == list(range(len(stream.positions)))
        assert stream.token_ids == sequence[: len(stream.positions)]
        assert (stream.closed.reason, stream.losses) == ("finished", [])
        assert (stream.closed.emitted, stream.closed.last_pos) == (len(stream.positions), stream.positions[-1])
        least = length - 1 if run.finish_reasons.get(index) in ("stop", "length") else min(length, 1)
        assert least <= len(stream.positions) <= max(length, len(run.prompt))
    assert told.holding.waiting == 0
    # A step's rows are read before the driver hears of its tokens.
    assert told.longest_wait > 0
