"""The examination: recognisable requests at once, each alone again, and transformers where that is possible."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from undercurrent.adapters.vllm.engine import VLLMEngine
from undercurrent.capture import steady
from undercurrent.capture.points import ELEMENT_BYTES
from undercurrent.cli.doctor.engine import Patient
from undercurrent.cli.doctor.findings import TOLERANCES, Comparison, Float32, Rows, bookkeeping, compare
from undercurrent.counts import counted
from undercurrent.errors import CaptureError, ProbingError
from undercurrent.spec import ExecutionMode, ExtractionPoint, Overflow, TensorType, parse_position

Tell = Callable[[str], None]

_ROUNDS = 5
_SEED = 20_260
_COMPARED = (TensorType.RESIDUAL_STREAM, TensorType.ATTN_OUT, TensorType.MLP_OUT, TensorType.FINAL_NORM)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do.

    Args:
        model: folder or name.
        engine_args: of vLLM.
        layers: decoder layers to look at; None chooses the first, the middle and the last.
        requests: at once.
        tokens: that each generates.
        parity_bytes: compare with transformers where the model's weights are at most this large in float32.
    """

    model: str
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    requests: int = 16
    tokens: int = 32
    parity_bytes: int = 8 << 30


@dataclass
class Report:
    """What was found.

    Args:
        facts: of engine and model, by name.
        supported: per tensor type, empty where it is captured, else why not.
        bookkeeping: what is wrong with positions and token ids.
        alone: per tensor type, records under load against the same request alone.
        parity: per tensor type, records under load against transformers; empty where that was not done.
        parity_skipped: why it was not done, empty where it was.
        cost: ratios and times, by name.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    supported: dict[str, str] = field(default_factory=dict)
    bookkeeping: list[str] = field(default_factory=list)
    alone: dict[str, Comparison] = field(default_factory=dict)
    parity: dict[str, Comparison] = field(default_factory=dict)
    parity_skipped: str = ""
    cost: dict[str, float] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Whether every record was right."""
        comparisons = [*self.alone.values(), *self.parity.values()]
        return not self.bookkeeping and bool(self.alone) and all(c.sound for c in comparisons)


def examine(plan: Plan, tell: Tell) -> Report:
    """Examine a model; the engine runs and ends inside.

    Args:
        plan: what to do.
        tell: gets a line about what is going on.

    Raises:
        CaptureError: this engine cannot capture at all; the text says why.
        ConfigError: the engine does not take its arguments.
        EngineDeadError: it did not come up.
    """
    report = Report()
    outline = VLLMEngine(plan.model, engine_args=plan.engine_args).outline()
    count = outline.layers
    layers = plan.layers or tuple(sorted({0, count // 2, count - 1}))
    with ExitStack() as stack:
        patient = _start(plan, _points(layers, count), report, stack, tell)
        info = patient.engine.info
        report.facts = {"model": info.model, "layers": info.layers, "width": info.width, "dtype": info.dtype}
        report.facts |= {**info.versions, "machine_code": steady.AVAILABLE, "runs": str(outline.combination)}
        report.facts |= {key: patient.engine.report.get(key) for key in ("taps", "tap_bytes", "residual_stream")}
        prompts = recognisable(plan.requests, len(patient.engine.tokenizer), info.max_model_len - plan.tokens - 1)
        tell(f"{counted(len(prompts), 'request')} at once")
        sequences, _ = patient.run(prompts, max_tokens=plan.tokens)
        rows = {point.name: patient.rows(sequences, point.name) for point in patient.points}
        report.bookkeeping = [line for some in rows.values() for one in some for line in bookkeeping(one)]
        tell("each of them alone")
        truth = _alone(patient, sequences)
        tolerance = TOLERANCES.get(info.dtype, min(TOLERANCES.values()))
        report.alone = {name: compare(some, truth[name], tolerance) for name, some in rows.items()}
        tell("what it costs")
        report.cost = _cost(patient, prompts, plan.tokens)
        fused = None if outline.combination.compile == "eager" else patient.fusions()
    report.facts["lost_fusions"] = _lost(plan, fused, tell)
    report.parity, report.parity_skipped = _parity(plan, info.dtype, sequences, rows, layers, tell)
    return report


def _lost(plan: Plan, fused: Mapping[str, int] | None, tell: Tell) -> str:
    """Return in words which fusions of the compiler the taps prevent, from an engine without them."""
    if fused is None:
        return "none: nothing is compiled"
    tell("the engine without taps, for its fusions")
    with Patient(plan.model, (), plan.engine_args) as bare:
        before = bare.fusions()
    lost = {name: count - fused.get(name, 0) for name, count in before.items() if count > fused.get(name, 0)}
    return ", ".join(f"{name} ({count} of {before[name]})" for name, count in sorted(lost.items())) or "none"


def recognisable(count: int, vocabulary: int, most: int) -> dict[str, list[int]]:
    """Return prompts of different lengths and tokens, no two alike.

    Args:
        count: of prompts.
        vocabulary: token ids to choose from.
        most: longest that fits the model.
    """
    generator = np.random.default_rng(_SEED)
    lengths = [max(1, min(most, 3 + 7 * index)) for index in range(count)]
    return {f"request-{i}": generator.integers(0, vocabulary, n).tolist() for i, n in enumerate(lengths)}


def _points(layers: Sequence[int], count: int) -> list[ExtractionPoint]:
    return [
        ExtractionPoint(
            name=kind.value,
            layers=(count,) if kind is TensorType.FINAL_NORM else tuple(layers),
            tensor_type=kind,
            position=parse_position("*"),
            execution_mode=ExecutionMode.ASYNC,
            overflow=Overflow.BLOCK,
        )
        for kind in _COMPARED
    ]


def _start(plan: Plan, points: list[ExtractionPoint], report: Report, stack: ExitStack, tell: Tell) -> Patient:
    """Return a running engine that captures as many of the points as it can; note why the others are refused."""
    left = list(points)
    while left:
        tell(f"starting the engine with {', '.join(point.name for point in left)}")
        try:
            patient = stack.enter_context(Patient(plan.model, left, plan.engine_args))
        except CaptureError as exc:
            refused = [point for point in left if point.name in str(exc)]
            if not refused:
                raise
            report.supported |= dict.fromkeys((point.name for point in refused), str(exc))
            left = [point for point in left if point not in refused]
            continue
        report.supported |= dict.fromkeys((point.name for point in left), "")
        return patient
    raise CaptureError("; ".join(report.supported.values()))


def _alone(patient: Patient, sequences: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, Float32]]:
    """Return by point and request what is captured of each sequence as the only one, its tokens given as a prompt."""
    truth: dict[str, dict[str, Float32]] = {point.name: {} for point in patient.points}
    for name, sequence in sequences.items():
        patient.forget()
        again, _ = patient.run({name: sequence[:-1]}, max_tokens=1)
        for point in patient.points:
            (rows,) = patient.rows(again, point.name)
            if rows.positions != tuple(range(len(sequence) - 1)):
                raise CaptureError(f"{name} alone: its positions are not 0 to {len(sequence) - 2}")
            truth[point.name][name] = rows.values
    patient.forget()
    return truth


def _cost(patient: Patient, prompts: Mapping[str, Sequence[int]], tokens: int) -> dict[str, float]:
    """Return what capture costs, from rounds with and without it by turns."""
    ratios = []
    before = patient.stats
    for _ in range(_ROUNDS):
        _, without = patient.run(prompts, max_tokens=tokens, captured=False)
        _, with_it = patient.run(prompts, max_tokens=tokens)
        ratios.append(without / with_it)
        patient.forget()
    after = patient.stats
    steps = max(1, after.steps - before.steps)
    return {
        "speed_with_capture": statistics.median(ratios),
        "capture_us_per_step": (after.capture_ns - before.capture_ns) / steps / 1e3,
        "rows_dropped": float(after.dropped_rows),
    }


def _parity(
    plan: Plan,
    dtype: str,
    sequences: Mapping[str, tuple[int, ...]],
    rows: Mapping[str, list[Rows]],
    layers: Sequence[int],
    tell: Tell,
) -> tuple[dict[str, Comparison], str]:
    """Compare with transformers; return the comparisons, and why there are none."""
    folder = Path(plan.model)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0
    whole = size * 4 // ELEMENT_BYTES.get(dtype, 4)
    if not size:
        return {}, "the model is no folder with safetensors weights"
    if whole > plan.parity_bytes:
        return {}, f"its weights take {whole >> 20} MiB in float32, more than {plan.parity_bytes >> 20}"
    tell("the same tokens through transformers")
    try:
        from undercurrent.adapters.hf.oracle import HFOracle

        oracle = HFOracle(folder, dtype)
    except (ImportError, OSError, ValueError, ProbingError) as exc:
        return {}, f"transformers cannot run it: {exc}"
    truth: dict[str, dict[str, Float32]] = {name: {} for name in rows}
    for name, sequence in sequences.items():
        computed = oracle.activations(sequence[:-1])
        for point in rows:
            whole_stack = computed[point]
            truth[point][name] = whole_stack if point == TensorType.FINAL_NORM.value else whole_stack[:, list(layers)]
    tolerance = TOLERANCES.get(dtype, min(TOLERANCES.values()))
    return {name: compare(some, truth[name], tolerance) for name, some in rows.items()}, ""
