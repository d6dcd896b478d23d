"""The start-up self-check: on the loaded model, what the residual stream is, and that every tap copies what it should.

A decoder layer that returns a pair (h, r) does not say whether the stream is h + r (most fused models) or h alone (it
was added up already). So the model runs once, and each layer's candidates are fed through what consumes the stream
next, the first module of the following layer or the final norm, and compared with what that module really computed.
Exactly one must fit, else capture is refused by name. Then the model runs again with the taps armed, and every buffer
must equal, bit for bit, what its module returned.

There is no KV cache in these runs, and without one attention leaves its output unset: it is replaced by fixed noise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from undercurrent.adapters.model_map import ModelMap
from undercurrent.adapters.vllm.tap import BESIDE, FIRST, SUM, WHOLE, Tap, TapSet
from undercurrent.errors import CaptureError

_ROWS = 16
_STEP = 1
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 3e-2}


@dataclass(slots=True)
class _Consumer:
    """The first module that ran on a layer's output, with what it computed."""

    module: nn.Module | None = None
    output: torch.Tensor | None = None
    entered: torch.Tensor | None = None


@dataclass(slots=True)
class _Seen:
    """What one run showed."""

    outputs: dict[int, Any] = field(default_factory=dict)
    consumers: dict[int, _Consumer] = field(default_factory=dict)


def self_check(
    run: Callable[[np.ndarray], None], taps: TapSet, parts: ModelMap, vocab_size: int, rows: int
) -> dict[str, str]:
    """Decide what each residual tap reads, and prove every tap; return the decision per layer class.

    Args:
        run: runs the model on int32 token ids, nothing of it compiled.
        taps: of the model, not installed yet; the mode of residual taps is set here, then they are installed.
        parts: of the model.
        vocab_size: token ids to choose from.
        rows: most rows that a run may have.

    Raises:
        CaptureError: the stream is ambiguous, or a tap does not copy what its module returned.
    """
    ids = np.random.default_rng(0).integers(0, vocab_size, min(_ROWS, rows), dtype=np.int32)
    decided: dict[str, str] = {}
    with torch.inference_mode():
        wanted = {tap.layer for tap in taps.taps if tap.group.tensor_type == "residual_stream"}
        modes: dict[int, str] = {}
        if wanted:
            with _quiet_attention(parts), _watch(parts) as seen:
                run(ids)
            modes = {layer: _mode(parts, seen, layer) for layer in sorted(wanted)}
        for tap in taps.taps:
            if tap.group.tensor_type == "residual_stream":
                tap.mode = modes[tap.layer]
                decided[type(tap.module).__name__] = tap.mode
        _prove(run, taps, parts, ids)
    taps.install()
    return decided


def _mode(parts: ModelMap, seen: _Seen, layer: int) -> str:
    name = f"layer {layer} ({type(parts.layers[layer]).__name__})"
    if layer not in seen.outputs:
        raise CaptureError(f"{name} did not run")
    candidates = _candidates(seen.outputs[layer], name)
    consumer = seen.consumers.get(layer, _Consumer())
    for tensor in candidates.values():
        if not torch.isfinite(tensor).all():
            raise CaptureError(f"{name}: the residual stream is not finite in a run without a KV cache")
    if len(candidates) == 1:
        ((mode, tensor),) = candidates.items()
        if consumer.entered is not None and torch.equal(consumer.entered, tensor):
            return mode
        raise CaptureError(f"{name}: what follows it does not read what it returned")
    errors = {mode: _misfit(consumer, tensor) for mode, tensor in candidates.items()}
    tolerance = _TOLERANCE.get(next(iter(candidates.values())).dtype, 1e-4)
    fits = [mode for mode, error in errors.items() if error <= tolerance]
    if len(fits) != 1:
        told = ", ".join(f"{mode}: {error:.2g}" for mode, error in errors.items())
        raise CaptureError(f"{name}: cannot tell which of its outputs is the residual stream (misfit of {told})")
    return fits[0]


def _candidates(output: Any, name: str) -> dict[str, torch.Tensor]:  # noqa: ANN401 - any layer's output
    if isinstance(output, torch.Tensor):
        return {WHOLE: output}
    if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
        rest = [part for part in output[1:] if part is not None]
        if not rest:
            return {FIRST: output[0]}
        if len(output) == 2 and isinstance(rest[0], torch.Tensor) and rest[0].shape == output[0].shape:
            return {FIRST: output[0], SUM: output[0] + rest[0]}
    raise CaptureError(f"{name} returns neither a tensor nor a pair (h, r) of one shape")


def _misfit(consumer: _Consumer, stream: torch.Tensor) -> float:
    """Return the relative L2 distance between what the consumer computes of a candidate and what it really computed."""
    if consumer.module is None or consumer.output is None:
        return float("inf")
    try:
        computed = _first(consumer.module(stream.clone()))
    except (TypeError, RuntimeError):
        # It is no norm of one argument, so it cannot tell.
        return float("inf")
    if computed is None or computed.shape != consumer.output.shape:
        return float("inf")
    real = consumer.output.double()
    return float((computed.double() - real).norm() / real.norm().clamp_min(1e-30))


def _first(value: Any) -> torch.Tensor | None:  # noqa: ANN401 - any module's output
    if isinstance(value, tuple | list):
        value = value[0] if value else None
    return value if isinstance(value, torch.Tensor) else None


def _clone(value: Any) -> Any:  # noqa: ANN401 - any module's output
    # Fused norms work in place on what they are given.
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(_clone(part) for part in value) if isinstance(value, tuple | list) else value


@contextmanager
def _quiet_attention(parts: ModelMap) -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)

    def replace(output: Any) -> Any:  # noqa: ANN401
        first = _first(output)
        if first is None:
            return output
        noise = torch.randn(first.shape, generator=generator).to(first)
        return (noise, *output[1:]) if isinstance(output, tuple) else noise

    undo = [_beneath(m, replace) for m in map(parts.attention, range(len(parts.layers))) if m is not None]
    try:
        yield
    finally:
        for step in undo:
            step()


def _beneath(module: nn.Module, replace: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace what a module gives below everything that will be laid over it; return what undoes that."""
    inner, previous = module.forward, module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: replace(inner(*args, **kwargs))

    def undo() -> None:
        if previous is None:
            del module.forward
        else:
            module.forward = previous

    return undo


@contextmanager
def _watch(parts: ModelMap) -> Iterator[_Seen]:
    seen = _Seen()
    handles = []

    def output_of(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
            seen.outputs[layer] = _clone(output)

        return hook

    def entering(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
            given = seen.outputs.get(layer)
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            expected = _first(given)
            same = [t for t in tensors if expected is not None and t.shape == expected.shape]
            seen.consumers.setdefault(layer, _Consumer()).entered = _clone(same[0]) if same else None

        return hook

    def first_of(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
            consumer = seen.consumers.setdefault(layer, _Consumer())
            if consumer.module is None:
                consumer.module, consumer.output = module, _clone(_first(output))

        return hook

    for layer, module in enumerate(parts.layers):
        handles.append(module.register_forward_hook(output_of(layer)))
        is_last = layer + 1 == len(parts.layers)
        following = parts.final_norm if is_last else parts.layers[layer + 1]
        handles.append(following.register_forward_pre_hook(entering(layer), with_kwargs=True))
        readers = [parts.final_norm] if is_last else list(following.children())
        handles += [reader.register_forward_hook(first_of(layer)) for reader in readers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _prove(run: Callable[[np.ndarray], None], taps: TapSet, parts: ModelMap, ids: np.ndarray) -> None:
    expected: dict[int, torch.Tensor] = {}
    handles = [_note(tap, expected) for tap in taps.taps]
    # A tap on attention reads what the module computed, which no hook has replaced yet: the noise comes from below it.
    with _quiet_attention(parts):
        taps.install()
        taps.arm(_STEP, len(ids))
        try:
            run(ids)
        finally:
            taps.remove()
            for handle in handles:
                handle.remove()
    taps.stale(_STEP, len(ids))
    for tap in taps.taps:
        name = f"{tap.group.tensor_type} of layer {tap.layer} ({type(tap.module).__name__})"
        if not taps.fired(tap, _STEP, len(ids)) or tap.slot not in expected:
            raise CaptureError(f"the tap on {name} did not fire on {len(ids)} rows")
        if not torch.equal(tap.out[: len(ids)], expected[tap.slot].to(tap.out.dtype)):
            raise CaptureError(f"the tap on {name} copied something else than the module gave")


def _note(tap: Tap, expected: dict[int, torch.Tensor]) -> Any:  # noqa: ANN401 - a handle of torch
    """Keep what a tap should copy, by other means than the tap's."""

    def of_output(_module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        expected[tap.slot] = _wanted(tap, output if isinstance(output, tuple) else (output,))

    def of_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        expected[tap.slot] = _wanted(tap, tuple(given.get(name) for name in tap.source.inputs))

    if tap.source.inputs:
        return tap.module.register_forward_pre_hook(of_inputs, with_kwargs=True)
    return tap.module.register_forward_hook(of_output)


def _wanted(tap: Tap, values: tuple[Any, ...]) -> torch.Tensor:
    tensors = [value.flatten(1) for value in values if isinstance(value, torch.Tensor)]
    if tap.mode == SUM and len(tensors) > 1:
        return tensors[0] + tensors[1]
    return torch.cat(tensors[:2], dim=1) if tap.mode == BESIDE else tensors[0].clone()
