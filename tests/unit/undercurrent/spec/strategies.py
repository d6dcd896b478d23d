"""Hypothesis strategies for valid points and specs."""

from __future__ import annotations

from hypothesis import strategies as st

from undercurrent.spec import (
    CaptureDtype,
    ExtractionPoint,
    InterventionPolicy,
    OnUnavailable,
    Overflow,
    ProbeSpec,
    TensorType,
    UntilPolicy,
)

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12).filter(str.strip)
continuous_positions = st.one_of(
    st.sampled_from(["*", "prompt[*]", "generated[*]"]),
    st.builds(
        lambda region, start, length: f"{region}[{start}:{'' if length is None else start + length}]",
        st.sampled_from(["prompt", "generated"]),
        st.integers(0, 9),
        st.none() | st.integers(1, 9),
    ),
)
single_positions = st.integers(0, 20) | st.builds(
    lambda region, index, offset: f"{region}[{index}]{f'{offset:+d}' if offset else ''}",
    st.sampled_from(["prompt", "generated"]),
    st.integers(-9, 9),
    st.integers(-4, 4),
)
untils = st.one_of(
    st.just(UntilPolicy()),
    st.integers(1, 9).map(lambda count: UntilPolicy("fixed_count", count)),
    (st.integers(0, 999) | names).map(lambda token: UntilPolicy("stop_token", None, token)),
)
plain = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**60), 2**60)
        | st.floats(allow_nan=False, allow_infinity=False)
        | names,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
interventions = st.none() | st.builds(InterventionPolicy) | st.builds(
    InterventionPolicy, st.just("block_until_signal"), st.integers(1, 9999), st.sampled_from(["continue", "abort"])
)  # fmt: skip


@st.composite
def points(draw: st.DrawFn, name: str | None = None) -> ExtractionPoint:
    """Any valid point."""
    is_continuous = draw(st.booleans())
    is_async = draw(st.booleans())
    return ExtractionPoint(
        name=name or draw(names),
        layers=draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True)),
        tensor_type=draw(st.sampled_from(TensorType)),
        position=draw(continuous_positions if is_continuous else single_positions),
        stride=draw(st.integers(1, 7)) if is_continuous else 1,
        until=draw(untils) if is_continuous else UntilPolicy(),
        probe_type=draw(st.none() | names),
        probe_kind=draw(st.sampled_from([None, "trajectory"] if is_async else [None, "trajectory", "single_shot"])),
        execution_mode="async" if is_async else "inline",
        queue_depth=draw(st.none() | st.integers(1, 99)) if is_async else None,
        intervention=draw(st.none() | st.builds(InterventionPolicy)) if is_async else draw(interventions),
        probe_args=draw(plain),
        dtype=draw(st.sampled_from(CaptureDtype)),
        overflow=draw(st.none() | st.sampled_from(Overflow)),
        token_ids=draw(st.booleans()),
        reduce=draw(st.none() | st.fixed_dictionaries({"project": names})),
        on_unavailable=draw(st.sampled_from(OnUnavailable)),
    )


@st.composite
def specs(draw: st.DrawFn) -> ProbeSpec:
    """Any valid spec."""
    chosen = draw(st.lists(names, max_size=3, unique=True))
    return ProbeSpec(1, [draw(points(name=name)) for name in chosen])
