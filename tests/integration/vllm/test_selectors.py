"""What each selector names and what each encoding makes of it, on a real engine, in every chunking and preempted."""

from __future__ import annotations

import numpy as np
import pytest
from inprocess import Ask, Capturing

from undercurrent.codec.tensors import bytes_of, rows_of
from undercurrent.errors import CaptureError
from undercurrent.spec import ExtractionPoint
from undercurrent.testing.wanted import wanted_positions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LAYERS = (0, 2)
K = 5


def point(name, position, **fields):
    fields = {"layers": LAYERS, "tensor_type": "residual_stream", "execution_mode": "async", **fields}
    return ExtractionPoint(name=name, position=position, **fields)


SELECTORS = (
    point("all", "*"),
    point("prompt", "prompt[*]"),
    point("prompt_part", "prompt[3:21]", stride=4),
    point("prompt_last", "prompt[-1]"),
    point("behind_prompt", "prompt[-1]+2"),
    point("fifth", 5),
    point("generated", "generated[*]", overflow="block"),
    point("strided", "generated[2:]", stride=3),
    point("window", "generated[8:11]"),
    point("far", "generated[1000:2000]"),
    point("five", "generated[1:]", until={"fixed_count": 5}),
    point("end", "generated[-1]"),
    point("third_last", "generated[-3]"),
    point("before_end", "generated[-1]-7"),
    point("behind", "generated[-4]+2"),
    point("until_text", "*", until={"stop_token": "e"}, stride=2),
    point("until_id", "generated[1:]", until={"stop_token": 77}),
    point("until_prompt", "prompt[*]", until={"stop_token": "a"}),
)


def check(runs, engine):
    encode = engine.engine.get_tokenizer().encode
    stops = {point.name: point.until.stop_token for point in engine.points}
    for run in runs.values():
        every = run.streams["all"]
        whole = dict(zip(every.positions, every.rows, strict=True))
        assert list(whole) == list(range(len(run.sequence) - 1))
        for spec in engine.points:
            stream, stop = run.streams[spec.name], stops[spec.name]
            stop = encode(stop)[0] if isinstance(stop, str) else stop
            expected = wanted_positions(spec, run.sequence[:-1], len(run.prompt), stop=stop)
            assert stream.positions == expected, spec.name
            assert stream.token_ids == [run.sequence[position] for position in expected], spec.name
            assert all(np.array_equal(r, whole[p]) for p, r in zip(expected, stream.rows, strict=True)), spec.name
            assert (stream.closed.emitted, stream.closed.dropped) == (len(expected), 0), spec.name


def load(prefix, count, lengths, max_tokens):
    random = np.random.default_rng(len(prefix))
    return [
        Ask(
            f"{prefix}{n}",
            random.integers(60, 110, lengths[n % len(lengths)]).tolist(),
            after=n,
            params={"max_tokens": max_tokens + n, "temperature": 1.0, "allowed_token_ids": list(range(60, 110))},
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("chunk", [16, 48])
def test_every_selector_gets_exactly_its_rows_whatever_the_chunks(models, chunk):
    with Capturing(models["llama"], SELECTORS, max_num_batched_tokens=chunk) as engine:
        runs = engine.run([*load("mixed", 6, (1, 15, 16, 17, 33, 70), 11), *load("one", 1, (9,), 1)])
        check(runs, engine)
        assert all(run.streams["far"].positions == [] for run in runs.values())
        ended = [len(run.streams[name].positions) for run in runs.values() for name in ("until_text", "until_id")]
        assert len(set(ended)) > 3, "no stop token was ever met"


def test_preempted_requests_keep_their_last_rows_and_their_ends(models, monkeypatch):
    with Capturing(models["llama"], SELECTORS, max_num_batched_tokens=16, num_gpu_blocks_override=14) as engine:
        scheduler, seen = engine.engine.engine_core.engine_core.scheduler, []
        original = scheduler._preempt_request
        monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (seen.append(1), original(*a, **k)))
        check(engine.run(load("pre", 8, (60, 61, 67), 50)), engine)
        assert len(seen) >= 3


def test_an_end_token_in_a_cached_prefix_ends_the_stream_before_it_begins(models):
    spec = (point("all", "*"), point("until", "*", until={"stop_token": 200}))
    with Capturing(models["llama"], spec, enable_prefix_caching=True) as engine:
        prompt = [65] * 40 + [200] + [66] * 40
        first = engine.run([Ask("first", prompt)])["first"]
        again = engine.run([Ask("again", prompt)])["again"]
        assert first.streams["until"].positions == list(range(41))
        assert again.streams["all"].positions[0] == 64
        assert again.streams["until"].positions == []


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    path = tmp_path_factory.mktemp("matrix") / "m.npy"
    np.save(path, np.random.default_rng(4).normal(size=(64, K)).astype(np.float32))
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_encoding_is_that_of_the_row_that_the_model_computed(models, matrix, dtype):
    encodings = ("float32", "float16", "bfloat16", "int8")
    points = [point("all", "*"), *(point(name, "*", dtype=name) for name in encodings)]
    points += [point("projected", "*", reduce={"project": str(matrix)})]
    points += [point("both", "*", reduce={"project": str(matrix)}, dtype="int8")]
    with Capturing(models["llama"], points, dtype=dtype) as engine:
        taps = len(engine.worker._undercurrent_capture._taps.taps)
        assert taps == len(LAYERS), "encodings do not share a tap"
        for run in engine.run(load("coded", 4, (3, 40), 9)).values():
            every = np.array(run.streams["all"].rows)
            assert every.dtype.name == dtype
            wide = every.astype(np.float32)
            for name in encodings:
                expected = rows_of(bytes_of(every, name), name, every.shape[2])
                assert np.array_equal(np.array(run.streams[name].rows).reshape(expected.shape), expected), name
            opened = run.streams["projected"].opened
            assert (opened.width, opened.dtype) == (K, "float32")
            exact = wide.astype(np.float64) @ np.load(matrix).astype(np.float64)
            got = np.array(run.streams["projected"].rows)
            assert got.shape == exact.shape
            assert np.abs(got - exact).max() <= 1e-5 * np.abs(exact).max()
            both = np.array(run.streams["both"].rows)
            assert np.abs(both - exact).max() <= np.abs(exact).max() / 127


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reduce": {"project": "nowhere.npy"}}, r"point 'wrong', reduce.project: nowhere.npy: cannot be read"),
        ({"until": {"stop_token": "ab"}}, "point 'wrong': until.stop_token 'ab' is 2 tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_at_start_by_name(models, fields, reason):
    with pytest.raises(CaptureError, match=reason), Capturing(models["llama"], [point("wrong", "*", **fields)]):
        pass
