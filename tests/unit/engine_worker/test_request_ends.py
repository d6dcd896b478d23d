"""Driver, ring and publisher together: nothing past a request's final length is published, and all before it is.

The engine is a scripted one that computes steps beyond a request's end, as engines do; the broker is a list.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.unit.engine_worker.line import Line, new_ring, spec_point
from undercurrent.codec import as_array, positions
from undercurrent.core import Probe, ProbeResult, ProbeSignal, default_registry, register_probe
from undercurrent.probes import Binding
from undercurrent.protocol.messages import VerdictKind
from undercurrent.testing import MemoryRing
from undercurrent.testing.fake_engine import FakeEngine, activation

OVERRUN = 4


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


def check_values(line):
    """Every published row is that of its own request and position."""
    for (key, index), stream in line.streams().items():
        for block in stream.blocks:
            for position, value in zip(positions(block).tolist(), as_array(block), strict=True):
                for layer, vector in zip((0, 2), value, strict=True):
                    np.testing.assert_array_equal(vector, activation(key.request_id, position, layer, 16, index=index))


def play(script, *, slots=64, max_held_bytes=1 << 20, overflow=None, **engine):
    async def run():
        ring, point = new_ring(slots), spec_point(**({} if overflow is None else {"overflow": overflow}))
        late = Late(points=[point], ring=ring, **{"step_s": 0.001, "overrun": OVERRUN, **engine})
        line = Line(ring, late, point, max_held_bytes=max_held_bytes)
        async with line.running():
            await script(line)
        check_values(line)
        return line

    return asyncio.run(run())


def test_rows_computed_after_the_last_token_are_not_published():
    async def script(line):
        for number in range(8):
            line.start(f"r{number}", prompt=[120] * (number + 1), max_tokens=5 + number)
        await line.idle()

    line = play(script)
    assert sorted(length for _, length in line.finals.values()) == [1 + n + 5 + n for n in range(8)]
    line.check(complete=True)
    # The first step after the end computes the last token's own row, which is real.
    assert line.past_end == 8 * (OVERRUN - 1)


def test_children_that_end_apart_and_one_that_is_aborted():
    async def script(line):
        key = line.start("r", max_tokens=400, n=3)
        await line.until(lambda: len(line.tokens[key, 1]) > 5)
        line.driver.abort(key, 1)
        await line.idle()

    line = play(script)
    reasons = {index: reason for (_, index), (reason, _) in line.finals.items()}
    assert reasons == {0: "length", 1: "abort", 2: "length"}
    line.check(complete=True)
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
    streams = line.check()
    lengths = {key: length for key, (_, length) in line.finals.items()}
    assert len(lengths) == 12
    assert all(3 <= length < 20 for length in lengths.values())
    # Aborted before its first step, a request may have no stream at all.
    assert all(len(stream.positions) in (0, lengths[key]) for key, stream in streams.items())


def test_rows_wait_for_a_driver_that_is_slower_than_its_engine_and_none_is_lost():
    async def script(line):
        line.engine.gate.clear()
        for number in range(4):
            line.start(f"r{number}", max_tokens=60)
        await line.until(lambda: line.engine.steps >= 60 + OVERRUN)
        await asyncio.sleep(0.05)
        streams = line.streams().values()
        assert [(len(stream.positions), stream.ended) for stream in streams] == [(3, None)] * 4
        line.engine.gate.set()
        await line.idle()

    line = play(script)
    assert {len(stream.positions) for stream in line.check(complete=True).values()} == {63}


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
    line.check(complete=True)


def test_an_id_that_is_used_again_right_after_an_abort_gets_no_row_of_the_old_run():
    async def script(line):
        for attempt in range(1, 30):
            key = line.start("r", attempt, prompt=[121] * (1 + attempt % 5), max_tokens=500)
            await line.until(lambda key=key, attempt=attempt: len(line.tokens[key, 0]) >= attempt % 3)
            line.driver.abort(key)
            await line.idle()
            line.driver.free(lambda _: False)

    # Two slots: each is given out again at once, while rows of its last run are still in the ring.
    line = play(script, slots=2)
    streams = line.streams()
    for (key, index), (_, length) in line.finals.items():
        found = streams[key, index]
        assert found.positions == list(range(len(found.positions)))
        assert len(found.positions) <= length
        assert found.token_ids == (line.prompts[key] + line.tokens[key, index])[: len(found.positions)]
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
        await line.until(lambda: len(line.tokens[key, 0]) > 20)
        line.engine.gate.clear()
        await asyncio.sleep(0.05)
        line.counted = 3 + len(line.tokens[key, 0])
        await line.driver.close()

    line = play(script)
    (stream,) = line.streams().values()
    assert stream.positions == list(range(line.counted))


class Counter(Probe):
    """Scores each position with itself."""

    def on_activation(self, record):
        return ProbeSignal(score=float(record.token_pos))

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, "")


def test_a_probe_host_scores_nothing_past_the_last_token(monkeypatch):
    monkeypatch.setattr(default_registry, "_factories", dict(default_registry._factories))
    register_probe("count", Counter)

    async def script(line):
        keys = [line.start(f"r{number}", max_tokens=6 + number) for number in range(6)]
        stopped = line.start("stopped", max_tokens=900)
        await line.until(lambda: len(line.tokens[stopped, 0]) > 30)
        line.driver.abort(stopped)
        await line.until(lambda: all((key, 0) in line.finals for key in keys))
        await line.idle()

    line = play(script)
    assert line.past_end > 7
    ring = MemoryRing([spec_point()], [Binding(name="count", point="p", probe="count", mode="shadow", args={})])
    ring.send(*line.broker.messages)
    for (key, _), (_, length) in line.finals.items():
        scored = {position for position, _ in ring.scores(key.request_id, "count")}
        assert scored == set(range(length))
        [result] = ring.verdicts(VerdictKind.RESULT, request_id=key.request_id)
        # Two layers of each position, and nothing that the stream's end speaks of is missing.
        assert (result.complete, result.missing, result.scored) == (True, 0, 2 * length)
