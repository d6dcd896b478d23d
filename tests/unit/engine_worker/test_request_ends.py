"""Driver, ring and publisher together: nothing past a request's final length is published, and all before it is.

The engine is a scripted one that computes steps beyond a request's end, as engines do; the broker is a list.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from contextlib import asynccontextmanager

import numpy as np
import pytest

from engine_worker.driver import EngineDriver
from engine_worker.publisher import PublisherLoop, PublisherSettings
from engine_worker.publisher_streams import Identity
from undercurrent.capture.lengths import LengthTable
from undercurrent.capture.ring import Ring
from undercurrent.codec import Codec, as_array, positions
from undercurrent.protocol.messages import ActivationBlock, PromptRequest, Sampling, StreamEnded, StreamStarted
from undercurrent.protocol.worker_types import Prompt, RunKey
from undercurrent.spec import parse_dict
from undercurrent.testing.fake_engine import FakeEngine, activation

CODEC = Codec()
SPEC = {
    "name": "p", "layers": [0, 2], "tensor_type": "residual_stream", "position": "*", "execution_mode": "async",
    "queue_depth": 64,
}  # fmt: skip
OVERRUN = 4


class Broker:
    """Takes everything."""

    def __init__(self):
        self.messages = []

    def write(self, records, waiting):
        self.messages += [CODEC.decode(out.value) for outs in records.values() for out in outs]
        return []


class Late(FakeEngine):
    """Says what it has generated only while `gate` is open."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gate = asyncio.Event()
        self.gate.set()

    async def submit(self, request):
        async for delta in super().submit(request):
            await self.gate.wait()
            yield delta


class Line:
    """What a worker process is made of, without a broker and without the protocol."""

    def __init__(self, *, slots=64, max_held_bytes=1 << 20, overflow=None, **engine):
        point = {**SPEC, **({} if overflow is None else {"overflow": overflow})}
        points = parse_dict({"version": 1, "extraction_points": [point]}).extraction_points
        self.ring = Ring.create(1 << 20, slots=slots)
        self.engine = Late(points=points, ring=self.ring, **{"step_s": 0.001, "overrun": OVERRUN, **engine})
        self.table = LengthTable(self.ring.lengths)
        self.driver = EngineDriver(self.engine, self, self.table)
        self.finals, self.rejected, self.tokens, self.failures, self.held = {}, [], defaultdict(int), [], []
        self.past_end = 0
        self.broker = Broker()
        self._stop = threading.Event()
        settings = PublisherSettings(
            ring=self.ring.path, identity=Identity(engine="e", incarnation=1, model="m"), kafka={}, topics={"p": "t"},
            partitions={"p": 1}, max_record_bytes={"p": 1 << 20}, interval_ms=2.0, max_held_bytes=max_held_bytes,
            blocking=("p",) if overflow == "block" else (),
        )  # fmt: skip
        self.loop = PublisherLoop(
            settings, self.ring.reader(), self.broker, self.hear_report, self._stop.wait, self.ring.lengths
        )
        self._thread = threading.Thread(target=self.loop.run)

    def hear_report(self, report):
        self.held.append(report.held_bytes)
        self.past_end += report.past_end

    @asynccontextmanager
    async def running(self):
        self._thread.start()
        await self.engine.start()
        try:
            yield self
        finally:
            await self.driver.close()
            await self.engine.close()
            self._stop.set()
            await asyncio.to_thread(self._thread.join)
            self.ring.close()

    def on_delta(self, key, delta, generated):
        self.tokens[key, delta.index] += len(delta.token_ids)
        assert self.tokens[key, delta.index] == generated
        if delta.finish_reason is not None:
            self.finals[key, delta.index] = (delta.finish_reason, delta.prompt_tokens + generated)

    def on_rejected(self, key, defect):
        self.rejected.append(defect)

    def on_failure(self, error):
        self.failures.append(error)

    def start(self, name, attempt=1, text="abc", **sampling):
        request = PromptRequest(request_id=name, prompt=text, sampling=Sampling(**sampling), created_at_us=0)
        prompt = Prompt(
            request_id=name, offset=0, content_hash=b"", n=request.sampling.n, request=request, points=("p",)
        )
        key = RunKey(name, attempt)
        self.driver.start(key, prompt)
        return key

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                assert not self.failures
                await asyncio.sleep(0.001)

    async def idle(self):
        """Wait until no request runs, and the engine has taken its last step."""
        await self.until(lambda: not self.driver.running)
        steps = -1
        while steps != self.engine.steps:
            steps = self.engine.steps
            await asyncio.sleep(0.03)

    def streams(self):
        """Return positions and the last message of each stream; check that every row is its own."""
        rows, ends = defaultdict(list), {}
        for message in self.broker.messages:
            if isinstance(message, StreamStarted):
                rows[RunKey(message.request_id, message.attempt), message.index] = []
            elif isinstance(message, StreamEnded):
                ends[RunKey(message.request_id, message.attempt), message.index] = message
            elif isinstance(message, ActivationBlock):
                stream = RunKey(message.request_id, message.attempt), message.index
                assert stream not in ends
                for position, value in zip(positions(message).tolist(), as_array(message), strict=True):
                    for layer, vector in zip((0, 2), value, strict=True):
                        expected = activation(message.request_id, position, layer, 16, index=message.index)
                        np.testing.assert_array_equal(vector, expected)
                    rows[stream].append(position)
        return rows, ends

    def check(self, *, complete=True):
        """Every published position lies before the final length that the driver told, and the ends agree."""
        rows, ends = self.streams()
        for stream, (reason, length) in self.finals.items():
            found = rows[stream]
            assert found == list(range(len(found)))
            if complete or reason != "abort":
                # The engine went on past the last token, so that one has a row as well.
                assert len(found) == length
            assert len(found) <= length
            if found:
                end = ends[stream]
                assert (end.emitted[0], end.dropped[0], end.last_pos) == (len(found), 0, found[-1])
        return rows, ends


def play(script, **options):
    async def run():
        line = Line(**options)
        async with line.running():
            await script(line)
        return line

    return asyncio.run(run())


def test_rows_computed_after_the_last_token_are_not_published():
    async def script(line):
        for number in range(8):
            line.start(f"r{number}", text="x" * (number + 1), max_tokens=5 + number)
        await line.idle()

    line = play(script)
    assert sorted(length for _, length in line.finals.values()) == [1 + n + 5 + n for n in range(8)]
    line.check()
    # The first step after the end computes the last token's own row, which is real.
    assert line.past_end == 8 * (OVERRUN - 1)


def test_children_that_end_apart_and_one_that_is_aborted():
    async def script(line):
        key = line.start("r", max_tokens=400, n=3)
        await line.until(lambda: line.tokens[key, 1] > 5)
        line.driver.abort(key, 1)
        await line.idle()

    line = play(script)
    reasons = {index: reason for (_, index), (reason, _) in line.finals.items()}
    assert reasons == {0: "length", 1: "abort", 2: "length"}
    line.check()
    assert line.past_end == 2 * (OVERRUN - 1) + OVERRUN - 1


@pytest.mark.parametrize("after_s", [0, 0.0005, 0.001])
def test_an_abort_before_or_about_the_first_step_leaves_what_was_counted_and_the_prompt(after_s):
    async def script(line):
        for number in range(12):
            key = line.start(f"r{number}", max_tokens=50)
            if after_s:
                await asyncio.sleep(after_s)
            line.driver.abort(key)
            await asyncio.sleep(0.001)
        await line.idle()

    line = play(script)
    rows, _ = line.check(complete=False)
    lengths = {key: length for key, (_, length) in line.finals.items()}
    assert len(lengths) == 12
    assert all(3 <= length < 20 for length in lengths.values())
    # Aborted before its first step, a request may have no stream at all.
    assert all(found in ([], list(range(lengths[key]))) for key, found in rows.items())


def test_rows_wait_for_a_driver_that_is_slower_than_its_engine_and_none_is_lost():
    async def script(line):
        line.engine.gate.clear()
        for number in range(4):
            line.start(f"r{number}", max_tokens=60)
        await line.until(lambda: line.engine.steps >= 60 + OVERRUN)
        await asyncio.sleep(0.05)
        rows, ends = line.streams()
        assert [len(found) for found in rows.values()] == [3] * 4
        assert ends == {}
        line.engine.gate.set()
        await line.idle()

    line = play(script)
    rows, _ = line.check()
    assert {len(found) for found in rows.values()} == {63}


def test_a_bounded_wait_blocks_the_reading_where_the_point_says_so():
    async def script(line):
        line.engine.gate.clear()
        line.start("r", max_tokens=200)
        await line.until(lambda: line.engine.steps > 100)
        await asyncio.sleep(0.3)
        assert line.ring.stats().used_bytes > 0
        line.engine.gate.set()
        await line.idle()

    line = play(script, overflow="block", max_held_bytes=4000)
    assert 0 < max(line.held) < 5000
    line.check()


def test_an_id_that_is_used_again_right_after_an_abort_gets_no_row_of_the_old_run():
    async def script(line):
        for attempt in range(1, 30):
            key = line.start("r", attempt, text="y" * (1 + attempt % 5), max_tokens=500)
            await line.until(lambda key=key, attempt=attempt: line.tokens[key, 0] >= attempt % 3)
            line.driver.abort(key)
            await line.idle()
            line.driver.free(lambda _: False)

    # Two slots: each is given out again at once, while rows of its last run are still in the ring.
    line = play(script, slots=2)
    rows, _ = line.streams()
    for (key, index), (_, length) in line.finals.items():
        assert rows[key, index] == list(range(len(rows[key, index])))
        assert len(rows[key, index]) <= length
    assert line.table.used == 0


def test_a_table_that_is_full_refuses_the_request_by_name():
    async def script(line):
        line.start("r", max_tokens=2, n=3)
        await line.idle()

    line = play(script, slots=2)
    assert [defect.error for defect in line.rejected] == ["no 3 of 2 request slots are free; 0 are taken"]


def test_slots_come_back_when_nobody_waits_for_their_streams():
    async def script(line):
        keys = [line.start(f"r{number}", max_tokens=3, n=2) for number in range(4)]
        await line.idle()
        assert line.table.used == 8
        line.driver.free(lambda key: key == keys[0])
        assert line.table.used == 2

    play(script)


def test_a_driver_that_stops_leaves_no_row_behind_that_it_has_not_counted():
    async def script(line):
        key = line.start("r", max_tokens=4000)
        await line.until(lambda: line.tokens[key, 0] > 20)
        line.engine.gate.clear()
        await asyncio.sleep(0.05)
        line.counted = 3 + line.tokens[key, 0]
        await line.driver.close()

    line = play(script)
    rows, _ = line.streams()
    (found,) = rows.values()
    assert found == list(range(line.counted))
