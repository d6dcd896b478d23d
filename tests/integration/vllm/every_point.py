"""Every tensor type at every kind of position and in every encoding, of one model with experts, and what is wrong.

    points = every_points(model)
    runs = engine.run(load())                          # however that engine runs
    with Reference.of(model) as reference:
        assert wrong_rows(runs, points, reference) == []

Three things are compared. Positions are those that `wanted_positions` finds one by one. What a selector or an encoding
gave is, bit for bit, what the same run gave of the whole sequence. And the whole sequences are what the V1 runner
computes without a compiler, a schedule ahead, drafts or stages, fed with the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import ALL, point
from inprocess import Ask, Capturing, Ran
from parity import tensor_problems
from transformers import AutoTokenizer

from undercurrent.codec.tensors import bytes_of, rows_of
from undercurrent.spec import CaptureDtype, ExtractionPoint
from undercurrent.testing.ring_log import CapturedStream
from undercurrent.testing.tiny_models import build_tiny_model
from undercurrent.testing.wanted import wanted_positions

K = 5
STOP = 77
"""Id of the token that ends streams; some points name it by its text."""

WHOLE = (
    point("all", "residual_stream", ALL),
    point("entering", "layer_input", ALL),
    point("kv", "kv", ALL),
    point("experts", "router_topk", ALL),
)


def expert_model(beside: Path | str) -> Path:
    """Return the folder of a model with experts, built beside another model's where it is not there yet."""
    folder = Path(beside).parent / "mixtral-of-every-point"
    return folder if folder.exists() else build_tiny_model("mixtral", folder)


def every_points(model: Path, inputs: Sequence[int] = ALL) -> tuple[ExtractionPoint, ...]:
    """Return the points, first those on whole sequences; the matrix of those that project lies in the model's folder.

    Args:
        model: folder.
        inputs: layers of which the input is captured: that of a pipeline stage's first one is refused by name.
    """
    matrix = model / "matrix.npy"
    np.save(matrix, np.random.default_rng(4).normal(size=(64, K)).astype(np.float32))
    project, text = {"project": str(matrix)}, AutoTokenizer.from_pretrained(model).decode([STOP])
    return (
        *(replace(spec, layers=tuple(inputs)) if spec.name == "entering" else spec for spec in WHOLE),
        point("kv_last", "kv", (1,), "generated[-1]"),
        point("kv_part", "kv", (0, 3), "prompt[3:21]", stride=4),
        point("kv_until", "kv", (2,), "*", until={"stop_token": text}),
        point("kv_int8", "kv", (3,), "generated[2:]", stride=3, dtype="int8"),
        point("experts_third_last", "router_topk", (2, 3), "generated[-3]"),
        point("experts_until", "router_topk", (1,), "generated[*]", until={"stop_token": STOP}),
        point("entering_window", "layer_input", (inputs[0], inputs[-1]), "generated[6:9]"),
        point("entering_end", "layer_input", (inputs[-1],), "generated[-1]-7"),
        point("far", "residual_stream", (1, 2), "generated[1000:2000]"),
        point("strided", "residual_stream", (1, 2), "generated[2:]", stride=3),
        point("five", "residual_stream", (1, 2), "generated[1:]", until={"fixed_count": 5}),
        point("until_strided", "residual_stream", (1, 2), "*", until={"stop_token": STOP}, stride=2),
        point("prompt_last", "residual_stream", (0, 3), "prompt[-1]"),
        point("behind", "residual_stream", (1, 2), "generated[-4]+2"),
        point("int8", "residual_stream", (1, 2), "*", dtype="int8"),
        point("int8_last", "residual_stream", (1, 2), "generated[-1]", dtype="int8"),
        point("projected", "residual_stream", (1, 2), "*", reduce=project),
        point("projected_int8", "residual_stream", (0, 3), "generated[*]", reduce=project, dtype="int8"),
    )


def load(prefix: str = "e", *, count: int = 6, tokens: int = 14, **params: object) -> list[Ask]:
    """Return requests whose prompts come in chunks beside the tokens of others; a stop token stands in some texts."""
    random = np.random.default_rng(5)
    lengths = (1, 15, 16, 33, 50, 70)
    letters = list(range(STOP - 6, STOP + 6))
    return [
        Ask(
            f"{prefix}{n}",
            random.integers(STOP - 6, STOP + 6, lengths[n % len(lengths)]).tolist() if n else [STOP + 1],
            after=n,
            params={"max_tokens": tokens + n, "temperature": 1.0, "allowed_token_ids": letters, **params},
        )
        for n in range(count)
    ]


def tempting_prompts(count: int = 24) -> list[list[int]]:
    """Return prompts of which some are continued by the stop token, where it is the likeliest."""
    random = np.random.default_rng(3)
    lengths = (70, 5, 20, 9)
    return [random.integers(STOP - 9, STOP + 9, lengths[n % 4]).tolist() for n in range(count)]


def meets_a_stop(run: Ran) -> bool:
    """Return whether the stop token was generated, and tokens after it that have rows."""
    return STOP in run.token_ids[0][:-2]


class Reference:
    """An engine of the V1 runner, eager, in this process, which computes given sequences."""

    def __init__(self, engine: Capturing) -> None:
        self._engine = engine
        self._asked = 0

    @classmethod
    @contextmanager
    def of(cls, model: Path) -> Iterator[Reference]:
        """Start it."""
        with Capturing(model, WHOLE) as engine:
            yield cls(engine)

    def whole(self, sequences: Mapping[str, Sequence[int]]) -> dict[str, dict[str, np.ndarray]]:
        """Return per name and tensor the rows of every token but the last, [tokens, layers, ...]."""
        self._asked += 1
        asks = [Ask(f"{self._asked}-{n}", s[:-1], params={"max_tokens": 1}) for n, s in sequences.items()]
        runs = self._engine.run(asks)
        return {
            name: {spec.name: shaped(runs[f"{self._asked}-{name}"].streams[spec.name]) for spec in WHOLE}
            for name in sequences
        }

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Ran]:
        """Return what the engine makes of some prompts, with the likeliest token each time."""
        self._asked += 1
        params = {"max_tokens": tokens}
        runs = self._engine.run([Ask(f"{self._asked}-{n}", p, params=params) for n, p in enumerate(prompts)])
        return list(runs.values())


def shaped(stream: CapturedStream) -> np.ndarray:
    """Return the rows of a stream, [tokens, layers, *shape of a row]."""
    opened = stream.opened
    return np.stack(stream.rows).reshape(-1, len(opened.layers), *(opened.row_shape or (opened.width,)))


def wrong_rows(runs: Mapping[str, Ran], points: Sequence[ExtractionPoint], reference: Reference) -> list[str]:
    """Return everything that is wrong with finished requests.

    Args:
        runs: that ended by their length, each captured at every point.
        points: from `every_points`.
        reference: what computes the same sequences.
    """
    truth = reference.whole({name: run.sequence for name, run in runs.items()})
    return [
        f"{name}/{problem}"
        for name, run in runs.items()
        for problem in (*_wrong_whole(run, points, truth[name]), *_wrong_parts(run, points))
    ]


def _wrong_whole(run: Ran, points: Sequence[ExtractionPoint], truth: Mapping[str, np.ndarray]) -> list[str]:
    found = []
    for spec in points[: len(WHOLE)]:
        stream = run.streams[spec.name]
        if stream.positions != list(range(len(run.sequence) - 1)):
            found.append(f"{spec.name}: positions {stream.positions}")
            continue
        wanted = {spec.name: truth[spec.name][:, list(spec.layers)]}
        off = tensor_problems(spec.name, shaped(stream), stream.positions, wanted)
        found += [f"{spec.name}: the rows of {off} are not the reference's"] if off else []
    return found


def _wrong_parts(run: Ran, points: Sequence[ExtractionPoint]) -> list[str]:
    found = []
    whole_of = {spec.tensor_type: spec for spec in points[: len(WHOLE)]}
    for spec in points:
        stream = run.streams[spec.name]
        wanted = wanted_positions(spec, run.sequence[:-1], len(run.prompt), stop=_stop_of(spec))
        if stream.positions != wanted or stream.token_ids != [run.sequence[p] for p in wanted]:
            found.append(f"{spec.name}: positions {stream.positions} with {stream.token_ids}, not {wanted}")
            continue
        end = (stream.closed.reason, stream.closed.emitted, stream.closed.dropped) if stream.closed else None
        if end != ("finished", len(wanted), 0):
            found.append(f"{spec.name}: ended as {end}")
        base = whole_of[spec.tensor_type]
        whole, places = run.streams[base.name].rows, [base.layers.index(layer) for layer in spec.layers]
        if wanted and not _same(spec, np.stack(stream.rows), np.stack([whole[p][places] for p in wanted])):
            found.append(f"{spec.name}: its rows are not those of the whole sequence")
    return found


def _stop_of(spec: ExtractionPoint) -> int | None:
    token = spec.until.stop_token
    return STOP if isinstance(token, str) else token


def _same(spec: ExtractionPoint, rows: np.ndarray, whole: np.ndarray) -> bool:
    if spec.reduce is not None:
        exact = whole.astype(np.float64) @ np.load(spec.reduce["project"]).astype(np.float64)
        steps = 127 if spec.dtype == "int8" else 1e5
        return rows.shape == exact.shape and bool(np.abs(rows - exact).max() <= np.abs(exact).max() / steps)
    plain = spec.dtype is CaptureDtype.MODEL
    expected = whole if plain else rows_of(bytes_of(whole, spec.dtype), spec.dtype, whole.shape[2])
    return np.array_equal(rows.reshape(expected.shape), expected)


def stops_met(runs: Mapping[str, Ran]) -> int:
    """Return how many streams ended at a stop token among generated ones."""
    return sum(
        STOP in run.streams["experts_until"].token_ids and len(run.streams["experts_until"].positions) > 1
        for run in runs.values()
    )
