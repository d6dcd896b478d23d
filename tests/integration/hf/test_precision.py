"""What `probe precision` predicts of an encoding is what a probe then reads from an engine that publishes it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hf_bench import ALL, WIDTH, bench_of, point

from undercurrent.capture.projection import load_projection
from undercurrent.evaluation.carrying import PROBE_NAME, PROJECTION_NAME, carry
from undercurrent.evaluation.dataset import RequestBlock
from undercurrent.evaluation.encodings import MODEL, Encoding
from undercurrent.evaluation.scoring import score_requests
from undercurrent.probes import LinearProbe

pytestmark = pytest.mark.timeout(120)

SIZE, LAYER = 8, 2
PROMPTS = {
    f"r{n}": text for n, text in enumerate((b"what is captured", b"of these", b"prompts, and", b"of what follows"))
}


def blocks_of(log, name, layers):
    """Yield what an engine published at a point as recorded requests."""
    for request, prompt in PROMPTS.items():
        stream = log.streams[request, 0, name]
        rows = np.stack(stream.rows).reshape(len(stream.positions), len(layers), -1)
        positions = np.array(stream.positions, np.int32)
        yield RequestBlock(
            request_id=request,
            attempt=1,
            index=0,
            split="fit",
            group=request,
            label="unknown",
            positions=positions,
            is_generated=positions >= len(prompt),
            token_ids=np.array(stream.token_ids, np.int32),
            rows={layer: rows[:, at] for at, layer in enumerate(layers)},
        )


async def published(model, dtype, points):
    async with bench_of(model, points, engine_args={"dtype": dtype}) as bench:
        names = tuple(p.name for p in points)
        requests = [bench.request(name, list(text), names, max_tokens=24) for name, text in PROMPTS.items()]
        await bench.run(*requests)
        return bench.log


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_predicted_scores_are_those_of_what_an_engine_publishes(llama, tmp_path, dtype):
    direction = np.random.default_rng(0).normal(size=WIDTH)
    probe = LinearProbe.from_arrays(direction, 0.5, layer=LAYER, tensor_type="residual_stream", threshold=0.0)
    recorded = asyncio.run(published(llama, dtype, [point("all", "residual_stream", ALL)]))
    rows = list(blocks_of(recorded, "all", ALL))
    assert rows[0].rows[LAYER].dtype.name == dtype

    (carried,) = carry(probe, rows, [SIZE], seed=3)
    carried.save(tmp_path)
    assert load_projection(tmp_path / PROJECTION_NAME, WIDTH).sha256 == carried.encoding.projection.sha256
    reduce = {"project": str(tmp_path / PROJECTION_NAME)}
    points = [point(name, "residual_stream", ALL, dtype=name) for name in ("int8", "float16")]
    points.append(point("projected", "residual_stream", ALL, reduce=reduce))
    log = asyncio.run(published(llama, dtype, points))

    as_recorded = score_requests(probe, rows)
    assert not as_recorded["error"].any()
    for name in ("int8", "float16"):
        predicted = score_requests(probe, Encoding(name).blocks(rows), keep_tokens=True)
        found = score_requests(probe, blocks_of(log, name, ALL), keep_tokens=True)
        for one, other in zip(predicted["token_scores"], found["token_scores"], strict=True):
            assert np.array_equal(one, other), name
        assert predicted.drop(columns=list(predicted.filter(like="token_"))).equals(
            found.drop(columns=list(found.filter(like="token_")))
        )
        if name == "int8":
            assert not np.array_equal(predicted["score"], as_recorded["score"])
    predicted = score_requests(carried.probe, carried.encoding.blocks(rows), keep_tokens=True)
    # As a host would: from the folder.
    saved = LinearProbe.from_folder(tmp_path / PROBE_NAME)
    found = score_requests(saved, blocks_of(log, "projected", ALL), keep_tokens=True)
    scale = float(np.abs(np.concatenate(list(predicted["token_scores"]))).max())
    for one, other in zip(predicted["token_scores"], found["token_scores"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * scale)
    # The control: another matrix gives other scores.
    (another,) = carry(probe, rows, [SIZE], seed=4)
    strange = score_requests(carried.probe, another.encoding.blocks(rows))
    assert np.abs(strange["score"] - found["score"]).max() > 1e-2 * scale
    assert Encoding(MODEL).recode(rows[0].rows[LAYER]) is rows[0].rows[LAYER]
