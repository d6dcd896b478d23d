"""Requests into an engine, deltas out of it."""

from __future__ import annotations

import asyncio

import pytest

from engine_worker.driver import EngineDriver, engine_id
from undercurrent.adapters.base import EngineDelta
from undercurrent.errors import BadRequestError, EngineDeadError
from undercurrent.protocol.messages import PromptRequest, Sampling
from undercurrent.protocol.worker_types import Prompt, RunKey
from undercurrent.testing.fake_engine import FakeEngine, generated_text

KEY = RunKey("r", 2)


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self):
        self.deltas, self.rejected, self.failures, self.generated = [], [], [], []

    def on_delta(self, key, delta, generated):
        self.deltas.append((key, delta))
        self.generated.append((delta.index, generated))

    def on_rejected(self, key, defect):
        self.rejected.append((key, defect))

    def on_failure(self, error):
        self.failures.append(error)


def prompt(**sampling):
    request = PromptRequest(request_id="r", prompt="p", sampling=Sampling(**sampling), created_at_us=0)
    return Prompt(request_id="r", offset=0, content_hash=b"", n=request.sampling.n, request=request)


async def until(condition, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


async def ended(driver):
    await until(lambda: not driver.running)


async def play(engine, script):
    heard = Heard()
    driver = EngineDriver(engine, heard)
    await engine.start()
    try:
        await script(driver, heard)
    finally:
        await driver.close()
        await engine.close()
    return heard


def test_a_request_is_generated_to_its_end():
    async def script(driver, heard):
        driver.start(KEY, prompt(max_tokens=5))
        await ended(driver)

    heard = asyncio.run(play(FakeEngine(step_s=0.001), script))
    assert "".join(delta.text for _, delta in heard.deltas) == generated_text(engine_id(KEY), 5)
    assert [delta.finish_reason for _, delta in heard.deltas] == [None] * 4 + ["length"]


def test_what_was_checked_is_what_is_submitted_so_that_a_prompt_is_tokenized_once():
    submitted = []

    class Seen(FakeEngine):
        def submit(self, request):
            submitted.append(request)
            return super().submit(request)

    async def script(driver, heard):
        driver.start(KEY, prompt(max_tokens=1))
        await ended(driver)

    asyncio.run(play(Seen(step_s=0.001), script))
    assert [(request.prompt, request.prompt_token_ids) for request in submitted] == [(None, (ord("p"),))]


@pytest.mark.parametrize("early", [True, False])
def test_an_abort_ends_every_child_once_however_early_it_comes(early):
    async def script(driver, heard):
        driver.start(KEY, prompt(max_tokens=2000, n=2))
        if not early:
            await until(lambda: heard.deltas)
        driver.abort(KEY)
        driver.abort(KEY)
        await ended(driver)

    heard = asyncio.run(play(FakeEngine(step_s=0.001), script))
    ends = [(delta.index, delta.finish_reason) for _, delta in heard.deltas if delta.finish_reason]
    assert sorted(ends) == [(0, "abort"), (1, "abort")]
    assert len(heard.deltas) < 200


@pytest.mark.parametrize("early", [True, False])
def test_a_child_is_stopped_alone_however_early_that_is_asked_for(early):
    async def script(driver, heard):
        driver.start(KEY, prompt(max_tokens=300, n=2))
        if not early:
            await until(lambda: heard.deltas)
        driver.abort(KEY, 1)
        driver.abort(KEY, 1)
        await ended(driver)

    heard = asyncio.run(play(FakeEngine(step_s=0.001), script))
    ends = {delta.index: delta.finish_reason for _, delta in heard.deltas if delta.finish_reason}
    assert ends == {0: "length", 1: "abort"}
    assert sum(len(delta.token_ids) for _, delta in heard.deltas if delta.index == 1) < 200


def test_what_the_engine_refuses_is_rejected_with_its_reason():
    async def script(driver, heard):
        driver.start(KEY, prompt(max_tokens=100))
        await ended(driver)

    heard = asyncio.run(play(FakeEngine(max_model_len=50), script))
    ((key, defect),) = heard.rejected
    assert (key, defect.kind) == (KEY, "bad_request")
    assert "more than the model's 50" in defect.error
    assert (heard.deltas, heard.failures) == ([], [])


class _Scripted(FakeEngine):
    """Fails, or ends its iterator, in a way that the scripted engine does not."""

    def __init__(self, error=None):
        super().__init__()
        self._error = error

    async def submit(self, request):
        yield EngineDelta(index=0, token_ids=(1,), text="a")
        if self._error is not None:
            raise self._error


def test_a_dead_engine_is_the_workers_end():
    async def script(driver, heard):
        driver.start(KEY, prompt())
        await until(lambda: heard.failures)

    heard = asyncio.run(play(_Scripted(EngineDeadError("gone")), script))
    assert [str(error) for error in heard.failures] == ["gone"]
    assert heard.rejected == []


def test_an_engine_that_refuses_late_rejects_all_the_same():
    async def script(driver, heard):
        driver.start(KEY, prompt())
        await until(lambda: heard.rejected)

    heard = asyncio.run(play(_Scripted(BadRequestError("no")), script))
    assert heard.failures == []


def test_children_that_an_engine_leaves_without_a_word_end_as_aborted():
    async def script(driver, heard):
        driver.start(KEY, prompt())
        await ended(driver)

    heard = asyncio.run(play(_Scripted(), script))
    assert [delta.finish_reason for _, delta in heard.deltas] == [None, "abort"]
