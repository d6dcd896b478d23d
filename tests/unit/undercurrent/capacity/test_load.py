"""What points put on their topics: sizes are those of the codec and the format, counts those of the selectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undercurrent.capacity.compression import framing_left
from undercurrent.capacity.load import Publishing, meeting_of, point_load
from undercurrent.capacity.model import ModelShape
from undercurrent.capacity.needs import SEGMENT_BYTES, disk, outage_s, partitions, segment_s
from undercurrent.capacity.traffic import Rows, Traffic, rows_of
from undercurrent.capacity.wire import Place, Stream, StreamSizes, around, block_of
from undercurrent.codec import Codec
from undercurrent.codec.blocks import RECORD_OVERHEAD_BYTES
from undercurrent.errors import ConfigError, SpecValidationError
from undercurrent.spec import ExtractionPoint
from undercurrent.testing.wanted import wanted_positions

MODEL = ModelShape(
    path=Path("config.json"), name="Llama", layers=4, width=64, dtype="bfloat16", shapes={"kv": (2, 2, 16)}
)


def point(position: str = "*", **fields: Any) -> ExtractionPoint:
    given = {"name": "residual", "layers": (1, 2), "tensor_type": "residual_stream", "execution_mode": "async"} | fields
    return ExtractionPoint(position=position, **given)  # type: ignore[arg-type]


def traffic(**fields: float) -> Traffic:
    return Traffic(**({"requests_per_s": 2.0, "tokens_per_s": 40.0, "prompt_tokens": 30.0} | fields))


@pytest.mark.parametrize(
    ("position", "fields"),
    [
        ("*", {}),
        ("generated[*]", {}),
        ("prompt[2:50]", {"stride": 3}),
        ("prompt[-1]", {}),
        ("generated[-2]", {}),
        ("generated[1:]", {"until": {"fixed_count": 5}, "stride": 2}),
        ("generated[1000:2000]", {}),
    ],
)
def test_rows_are_those_that_an_engine_captures(position: str, fields: dict[str, Any]) -> None:
    wanted = wanted_positions(point(position, **fields), [0] * (30 + 20 - 1), 30)
    found = rows_of(point(position, **fields), traffic())
    assert found.total == len(wanted)
    if not point(position, **fields).needs_final_length:
        assert found.prompt == sum(place < 30 for place in wanted)


def test_a_part_of_a_token_and_a_cached_prefix_count() -> None:
    assert rows_of(point(), traffic(tokens_per_s=41.0)) == Rows(prompt=30, generated=19.5, steps=tuple(range(1, 20)))
    assert rows_of(point(), traffic(cached_tokens=16.0)) == Rows(prompt=14, generated=19, steps=tuple(range(1, 20)))


def test_rows_leave_in_the_steps_that_compute_them() -> None:
    assert rows_of(point("generated[3:7]", stride=2), traffic()).steps == (4, 6)
    assert rows_of(point("prompt[0:2]"), traffic()).steps == ()
    # Known at the end alone.
    assert rows_of(point("generated[-2]"), traffic()).steps == (20,)


@pytest.mark.parametrize("tokens", [1, 64])
def test_framing_is_what_the_codec_writes(tokens: int) -> None:
    stream = Stream(point="p", tensor_type="residual_stream", layers=(1, 2), width=64, dtype="int8", row_bytes=2 * 68)
    places = bytes(4 * tokens)
    value = len(Codec().encode(block_of(stream, positions=places, token_ids=places, data=bytes(2 * 68 * tokens))))
    framing = StreamSizes(stream).framing(tokens)
    assert framing == value - tokens * (2 * 68 + 8) + around(36, value)


def test_a_record_that_is_too_long_is_split() -> None:
    stream = Stream(point="p", tensor_type="residual_stream", layers=(1,), width=64, dtype="float32", row_bytes=256)
    room = RECORD_OVERHEAD_BYTES + 10 * (256 + 8)
    assert StreamSizes(stream).pieces(25, room) == [10, 10, 5]
    assert StreamSizes(stream).pieces(0, room) == []


def test_encodings_and_projections_change_the_values_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.ones((64, 8), np.float32))
    how = Publishing(codec="none")
    sizes = {
        name: point_load(point(**fields), MODEL, traffic(), how)
        for name, fields in {
            "model": {},
            "int8": {"dtype": "int8"},
            "float32": {"dtype": "float32"},
            "project": {"reduce": {"project": str(tmp_path / "m.npy")}},
            "kv": {"tensor_type": "kv"},
        }.items()
    }
    rows = 2.0 * (30 + 19)
    per_row = {"model": 2 * 128, "int8": 2 * 68, "float32": 2 * 256, "project": 2 * 32, "kv": 2 * 2 * 2 * 16 * 2}
    assert {name: load.value_bytes_s for name, load in sizes.items()} == {n: rows * b for n, b in per_row.items()}
    one = sizes["model"]
    assert one.bytes_s == one.value_bytes_s + one.beside_bytes_s + one.framing_bytes_s + one.batches_s * 61
    assert one.records_s == 2.0 * (2 + 1 + 19)


def test_batches_are_at_most_records_and_at_most_drains() -> None:
    def per_second(rate: float, interval_ms: float) -> float:
        how = Publishing(partitions=4, engines=2, interval_ms=interval_ms)
        return point_load(point(), MODEL, traffic(requests_per_s=rate, tokens_per_s=20 * rate), how).batches_s

    # The start leaves with the prompt: 20 rows and the end make as many batches where nothing else meets.
    assert per_second(1e-3, 20) == pytest.approx(21e-3, rel=0.01)
    # A request takes 0.5 s: its records are in two cycles of a second or in one.
    assert per_second(1e-3, 1000) == pytest.approx(1.5e-3, rel=0.01)
    assert per_second(1e4, 20) == pytest.approx(2 * 4 / 0.025)  # a token each 25 ms


def test_requests_meet_as_they_do_in_a_simulation() -> None:
    how, few = Publishing(partitions=1, interval_ms=100), traffic(requests_per_s=3.0, tokens_per_s=60.0)
    meeting = meeting_of(rows_of(point("generated[0:8]", stride=3), few), 0, few, how)
    rng, cycles = np.random.default_rng(0), 20_000
    begun = rng.uniform(0, cycles * 0.1, rng.poisson(3.0 * cycles * 0.1))
    times = np.array([0.0, 0.025, 0.1, 0.175, 0.5])
    counts = np.bincount(((begun[:, None] + times).ravel() / 0.1).astype(int))[:cycles]
    assert meeting.occupied == pytest.approx(np.count_nonzero(counts) / cycles, rel=0.02)
    assert meeting.records == pytest.approx(counts.sum() / np.count_nonzero(counts), rel=0.02)
    drawn = list(meeting.draw(4_000, 100))
    assert np.mean([len(batch) for batch in drawn]) == pytest.approx(meeting.records, rel=0.03)
    alone = np.mean([len({met.request for met in batch}) == 1 for batch in drawn])
    mean = meeting.requests
    assert alone == pytest.approx(mean * np.exp(-mean) / (1 - np.exp(-mean)), rel=0.05)
    for batch in drawn:
        assert all(0 <= met.at_s < 0.1 for met in batch)
        assert [met.at_s for met in batch] == sorted(met.at_s for met in batch)


def test_compression_takes_the_more_of_framing_the_more_records_a_batch_has() -> None:
    def left(engines: int, codec: str = "lz4") -> float:
        # As many records a second, in more and more batches.
        how = Publishing(codec=codec, engines=engines)
        busy = traffic(requests_per_s=200.0, tokens_per_s=4000.0)
        return point_load(point(), MODEL, busy, how).framing_left

    shares = [left(engines) for engines in (1, 8, 64, 1024)]
    assert shares == sorted(shares)
    assert 0.1 < shares[0] < shares[-1] <= 1
    assert left(1, "zstd") < shares[0]
    assert left(1, "none") == 1


def test_framing_that_compression_leaves_is_without_values() -> None:
    noise = np.random.default_rng(5).bytes(4096)
    # What repeats goes, what does not stays; a batch that would grow is left as it is.
    assert framing_left([(noise + b"again" * 200, 4096)], "lz4") < 0.2
    assert framing_left([(noise, 3000), (noise[:100], 0)], "zstd") == 1
    assert framing_left([(noise + b"again" * 200, 4096)], "none") == 1


def test_a_record_is_as_long_as_its_framing_says() -> None:
    stream = Stream(point="p", tensor_type="residual_stream", layers=(1,), width=64, dtype="bfloat16", row_bytes=128)
    sizes = StreamSizes(stream)
    # Numbers of another size take a byte more or less.
    for tokens in (1, 30):
        place = Place(seq=100, position=7, tokens=tokens, step=3, offset=2)
        made = len(sizes.block(3, place, bytes(128 * tokens)))
        assert made == pytest.approx(sizes.framing(tokens) + tokens * (128 + 8), abs=3)
    both = sum(len(sizes.end_record(3, 0, opens=opens)) for opens in (True, False))
    assert both == pytest.approx(sizes.ends(), abs=3)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"layers": (4,)}, "point 'residual': the model has layers 0 to 3"),
        ({"tensor_type": "final_norm"}, "point 'residual': final_norm has one layer, 4 on this model"),
        ({"tensor_type": "router_topk"}, "tensor_type router_topk is not captured of this model"),
    ],
)
def test_points_that_do_not_fit_the_model_are_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecValidationError, match=says) as caught:
        point_load(point(**fields), MODEL, traffic(), Publishing())
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"requests_per_s": 0.0}, "--requests-per-s: 0; accepted: a number above 0"),
        ({"tokens_per_s": float("nan")}, "--tokens-per-s: nan"),
        ({"tokens_per_s": 1.0}, "--tokens-per-s: 1; accepted: at least --requests-per-s, 2"),
        ({"requests_per_s": 1e-320}, "--tokens-per-s: .*; accepted: up to 16777216 for each"),
        ({"prompt_tokens": 1e20}, r"--prompt-tokens: 1e\+20; accepted: at least 1, up to 16777216"),
        ({"prompt_tokens": 0.5}, "--prompt-tokens: 0.5; accepted: at least 1"),
        ({"cached_tokens": 30.0}, "--cached-tokens: 30; accepted: from 0 to below --prompt-tokens, 30"),
        ({"token_ms": -1.0}, "--token-ms: -1"),
    ],
)
def test_traffic_that_cannot_be_is_named(fields: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        traffic(**fields)


def test_disks_hold_what_waits_for_its_segment() -> None:
    assert segment_s(3600) == 900
    assert segment_s(60) == 15
    assert disk(1000.0, 4, 3600, 3).used_bytes == 1000 * (3600 + 900 + 300) * 3
    fast = disk(1e9, 1, 3600, 1)
    assert fast.roll_s == SEGMENT_BYTES / 1e9


def test_partitions_and_buffers() -> None:
    assert partitions(25e6, 10e6, 0.0) == 3
    assert partitions(1.0, 10e6, 4.2) == 5
    load = point_load(point(), MODEL, traffic(), Publishing())
    assert load.ring_bytes_s == 2 * 49 * (256 + 8)
    assert outage_s([load, load], 2, 64 << 20, 32 << 20) == pytest.approx((96 << 20) / load.ring_bytes_s)
