"""The fake engine keeps the engine's contract and writes real frames."""

import asyncio

import numpy as np
import pytest

from undercurrent.adapters.base import CaptureOrder, EngineRequest
from undercurrent.capture.frames import Close, Open, Step, decode
from undercurrent.capture.ring import Ring
from undercurrent.errors import BadRequestError
from undercurrent.protocol.messages import Sampling
from undercurrent.spec import parse_dict
from undercurrent.testing.fake_engine import FakeEngine, activation, generated_text

POINT = parse_dict(
    {
        "version": 1,
        "extraction_points": [
            {
                "name": "p",
                "layers": [1, 3],
                "tensor_type": "residual_stream",
                "position": "*",
                "execution_mode": "async",
                "queue_depth": 8,
                "probe_type": "none",
            }
        ],
    }
).extraction_points[0]


UNKNOWN_POINT = CaptureOrder(request_id="r", attempt=1, points=("q",), partition=0)


def request(name, prompt="abc", *, tokens=5, n=1):
    order = CaptureOrder(request_id=name, attempt=1, points=("p",), partition=0)
    return EngineRequest(engine_id=f"e-{name}", prompt=prompt, sampling=Sampling(max_tokens=tokens, n=n), capture=order)


async def collect(engine, wanted, stop_after=None):
    deltas = []
    async for delta in engine.submit(wanted):
        deltas.append(delta)
        if stop_after is not None and len(deltas) == stop_after:
            await engine.abort(wanted.engine_id)
    return deltas


def run(body):
    async def main():
        ring = Ring.create(1 << 20)
        engine = FakeEngine(points=[POINT], ring=ring, step_s=0.001)
        await engine.start()
        try:
            outcome = await asyncio.wait_for(body(engine), 30)
            await asyncio.sleep(0.01)
        finally:
            await engine.close()
        return outcome, frames(ring)

    return asyncio.run(main())


def frames(ring):
    """Return, per request and child, its (position, row) pairs, and the closes."""
    opened, rows, closed = {}, {}, []
    reader = ring.reader()
    for frame in reader.read():
        content = decode(frame)
        if isinstance(content, Open):
            opened[content.stream] = (content.request_id, content.index)
        elif isinstance(content, Close):
            closed.append((opened[content.stream], content.last_pos))
        elif isinstance(content, Step):
            for stream, where, _, data in content.segments():
                values = np.frombuffer(data, "<f4").reshape(-1, 2, 16).copy()
                rows.setdefault(opened[stream], []).extend(
                    zip(np.frombuffer(where, "<i4").tolist(), values, strict=True)
                )
    ring.close()
    return rows, closed


def test_concurrent_requests_give_their_tokens_and_their_activations():
    wanted = [request("a"), request("b", "prompt", tokens=9)]

    async def body(engine):
        return await asyncio.gather(*(collect(engine, r) for r in wanted))

    (first, second), (rows, closed) = run(body)
    assert "".join(d.text for d in first) == generated_text("a", 5)
    assert "".join(d.text for d in second) == generated_text("b", 9)
    assert [d.finish_reason for d in first] == [None] * 4 + ["length"]
    assert [p for p, _ in rows["b", 0]] == list(range(6 + 8))
    for position, row in rows["b", 0]:
        assert row[1].tobytes() == activation("b", position, 3, 16).tobytes()
    assert dict(closed) == {("a", 0): 6, ("b", 0): 13}


def test_an_abort_ends_the_request_within_a_step_or_two():
    deltas, (_, closed) = run(lambda engine: collect(engine, request("a", tokens=1000), stop_after=3))
    assert deltas[-1].finish_reason == "abort"
    assert sum(len(d.token_ids) for d in deltas) <= 5
    assert [key for key, _ in closed] == [("a", 0)]


def test_each_child_ends_once():
    deltas, (rows, closed) = run(lambda engine: collect(engine, request("a", n=3)))
    assert sorted(d.index for d in deltas if d.finish_reason) == [0, 1, 2]
    assert sorted(key for key, _ in closed) == sorted(rows) == [("a", 0), ("a", 1), ("a", 2)]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (request("a", ""), "no tokens"),
        (request("a", "x" * 5000), "5000 prompt tokens"),
        (EngineRequest(engine_id="e", prompt="x", sampling=Sampling(temperature=-1.0)), "temperature is -1.0"),
(EngineRequest(engine_id="e", prompt="x", capture=UNKNOWN_POINT), "points: q"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_run_says_why(bad, said):
    with pytest.raises(BadRequestError, match=said):
        asyncio.run(FakeEngine(points=[POINT], ring=Ring.create(1 << 16)).check(bad))
