"""The start-up self-check: on the loaded model, what the residual stream is, and that every tap copies what it should.

`residual.decide` says what of each layer's output is the stream. Then the model runs with the taps armed, and every
buffer must equal, bit for bit, what its module returned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from undercurrent.adapters.model_map import ModelMap
from undercurrent.adapters.vllm.entering import decide_inputs
from undercurrent.adapters.vllm.residual import decide, quiet_attention
from undercurrent.adapters.vllm.tap import BESIDE, SUM, Tap, TapSet
from undercurrent.errors import CaptureError

_ROWS = 16
_STEP = 1


def check_ids(vocab_size: int, rows: int) -> np.ndarray:
    """Return the token ids that a model is checked on, int32 [at most 16].

    Args:
        vocab_size: token ids to choose from.
        rows: most rows that a run may have.
    """
    return np.random.default_rng(0).integers(0, vocab_size, min(_ROWS, rows), dtype=np.int32)


def self_check(
    run: Callable[[np.ndarray], None], taps: TapSet, parts: ModelMap, vocab_size: int, rows: int
) -> dict[str, str]:
    """Decide what each residual tap reads, and prove every tap; return the decision per layer class.

    Args:
        run: runs the model on int32 token ids, nothing of it compiled.
        taps: of the model, not installed yet; the mode of those on the stream is set here, then they are installed.
        parts: of the model.
        vocab_size: token ids to choose from.
        rows: most rows that a run may have.

    Raises:
        CaptureError: the stream is ambiguous, or a tap does not copy what its module returned.
    """
    ids = check_ids(vocab_size, rows)
    residual = [tap for tap in taps.taps if tap.group.tensor_type == "residual_stream"]
    entering = [tap for tap in taps.taps if tap.group.tensor_type == "layer_input"]
    before = [tap.layer - 1 for tap in entering if tap.layer and _is_here(parts.layers[tap.layer - 1])]
    modes = decide(lambda: run(ids), parts, [*before, *(tap.layer for tap in residual)])
    for tap in residual:
        tap.mode = modes[tap.layer]
    inputs = decide_inputs(lambda: run(ids), parts, modes, [tap.layer for tap in entering])
    for tap in entering:
        tap.mode = inputs[tap.layer]
    with torch.inference_mode():
        _prove(run, taps, parts, ids)
    taps.install()
    return {type(tap.module).__name__: tap.mode for tap in residual}


def _is_here(layer: nn.Module) -> bool:
    """Whether a layer is in this process: one that another pipeline stage holds has no parameters here."""
    return any(True for _ in layer.parameters())


def _prove(run: Callable[[np.ndarray], None], taps: TapSet, parts: ModelMap, ids: np.ndarray) -> None:
    expected: dict[int, torch.Tensor] = {}
    handles = [_note(tap, expected) for tap in taps.taps]
    # A tap on attention reads what the module computed, which no hook has replaced yet: the noise comes from below it.
    with quiet_attention(parts):
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
        wanted = expected[tap.slot]
        if torch.promote_types(wanted.dtype, tap.out.dtype) != tap.out.dtype:
            raise CaptureError(
                f"the {name} is {_named(wanted.dtype)} in a model of {_named(tap.out.dtype)}: its rows would be "
                f"rounded (load the model with dtype={_named(wanted.dtype)}, or leave {tap.group.tensor_type} out)"
            )
        if not torch.equal(tap.out[: len(ids)], wanted.to(tap.out.dtype)):
            raise CaptureError(f"the tap on {name} copied something else than the module gave")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    # Models of transformers keep a batch of one before their rows.
    width = tap.group.width // 2 if tap.mode == BESIDE else tap.group.width
    tensors = [
        value.reshape(-1, width) if value.shape[:-2] == (1,) and value.shape[-1] == width else value.flatten(1)
        for value in values
        if isinstance(value, torch.Tensor)
    ]
    if tap.mode == SUM and len(tensors) > 1:
        return tensors[0] + tensors[1]
    return torch.cat(tensors[:2], dim=1) if tap.mode == BESIDE else tensors[0].clone()
