"""What of a decoder layer's output is the residual stream: decided by what the module after it reads.

A layer that returns a pair (h, r) does not say whether the stream is h + r (most fused models) or h alone (it was added
up already, and r is a leftover). Comparing with a norm would guess where no norm comes next. So the model runs once,
without capture, and each layer's follower, the next layer or the final norm, is called again on inputs that differ
in one thing:

- another r changes nothing, another h does: the stream is h;
- another r matters, but (h + r, 0) and (0, h + r) compute the same as (h, r): the stream is h + r.

Neither, or a follower that was given something else than the layer returned: capture is refused by name. These runs
have no KV cache, and without one attention and state-space mixers leave their output unset: it is fixed noise instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from undercurrent.adapters.model_map import FIRST, SUM, WHOLE, ModelMap
from undercurrent.errors import CaptureError

_SAME = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest change of a follower's output that is rounding, by element type: relative L2 of the median row."""

_DIFFERS = 0.1
"""Least change that another input, as large as the stream, makes where it is read."""


def decide(run: Callable[[], None], parts: ModelMap, layers: Iterable[int]) -> dict[int, str]:
    """Return what the residual stream is after each of some layers: `SUM`, `FIRST` or `WHOLE`.

    Args:
        run: runs the model eagerly on some rows, without requests and without a KV cache.
        parts: of the model; nothing else may be hooked to them that acts.
        layers: to decide, 0-based.

    Raises:
        CaptureError: one of them cannot be decided; it names the layer, its class and the reason.
    """
    wanted = sorted(set(layers))
    if not wanted:
        return {}
    seen = _Watch(parts)
    with torch.inference_mode(), quiet_attention(parts), seen:
        run()
    return {layer: _decision(parts, seen, layer) for layer in wanted}


def _decision(parts: ModelMap, seen: _Watch, layer: int) -> str:
    name = _name(parts, layer)
    if seen.order.count(layer) > 1:
        raise CaptureError(f"{name} runs more than once in a step: its output has no one value")
    if layer in seen.modes:
        return seen.modes[layer]
    if layer in seen.errors:
        raise CaptureError(f"{name}: {seen.errors[layer]}")
    if layer not in seen.outputs:
        raise CaptureError(f"{name} did not run")
    # What reads it is in another pipeline stage. Layers of its class return their stream in one way.
    kind, form = type(parts.layers[layer]), _form(seen.outputs[layer])
    alike = {
        mode
        for other, mode in seen.modes.items()
        if type(parts.layers[other]) is kind and _form(seen.outputs[other]) == form
    }
    if len(alike) == 1:
        return alike.pop()
    raise CaptureError(f"{name}: nothing in this process reads what it returned, and no other layer of its class tells")


def _name(parts: ModelMap, layer: int) -> str:
    return f"layer {layer} ({type(parts.layers[layer]).__name__})"


def _form(output: Any) -> tuple[bool, ...]:  # noqa: ANN401 - any layer's output
    return tuple(part is not None for part in output) if isinstance(output, tuple) else ()


class _Undecided(Exception):  # noqa: N818 - no error yet: it becomes one if this layer's stream is wanted
    """Why a layer's stream cannot be told."""


def _mode(given: _Inputs, output: Any, follower: _Follower) -> str:  # noqa: ANN401 - any layer's output
    """Return what of a layer's output its follower reads.

    Args:
        given: what the layer was called with.
        output: of the layer.
        follower: what ran next.

    Raises:
        _Undecided: that is none of the known ways.
    """
    first, rest = _pair(output)
    for tensor in (first, rest):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise _Undecided("what it returned is not finite in a run without a KV cache")
    inputs, trial = follower.inputs, _Trial(follower, _SAME.get(first.dtype, 1e-4))
    alone = FIRST if isinstance(output, tuple) else WHOLE
    in_first, in_rest = inputs.holding(first), inputs.holding(rest)
    # Some models add the pair up between their layers.
    added = inputs.holding(first + rest) if rest is not None and not in_first and not in_rest else frozenset()
    if not in_first and not added:
        raise _Undecided("what follows it does not read what it returned")
    trial.check_repeatable()
    other = _noise(first, rest)
    beside = inputs.like(first) - in_first - in_rest - added
    beside -= {place for place in beside if given.holding(inputs.at(place))}
    if not trial.same({beside: other}):
        raise _Undecided("what follows it reads something else that came up beside what it returned")
    if added and trial.differs({added: other}):
        return SUM
    if rest is None or not in_rest or trial.same({in_rest: other}):
        if trial.differs({in_first: other}):
            return alone
        raise _Undecided(f"cannot tell that what follows it reads what it returned ({trial.told})")
    total, nothing = first + rest, torch.zeros_like(first)
    if (
        trial.differs({in_rest: other})
        and trial.same({in_first: total, in_rest: nothing})
        and trial.same({in_first: nothing, in_rest: total})
    ):
        return SUM
    raise _Undecided(f"cannot tell which of its outputs is the residual stream ({trial.told})")


def _pair(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:  # noqa: ANN401 - any layer's output
    if isinstance(output, torch.Tensor):
        return output, None
    if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
        rest = [part for part in output[1:] if part is not None]
        if not rest:
            return output[0], None
        if len(output) == 2 and isinstance(rest[0], torch.Tensor) and rest[0].shape == output[0].shape:
            return output[0], rest[0]
    raise _Undecided("it returns neither a tensor nor a pair (h, r) of one shape")


def _noise(first: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
    """Return fixed noise whose rows are as large as the larger of two tensors' rows: it shows wherever it is read.

    Noise as large as r alone would hide in rounding where r is small beside h.
    """
    noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(1)).to(first.device)
    size = first.float().norm(dim=-1, keepdim=True)
    if rest is not None:
        size = torch.maximum(size, rest.float().norm(dim=-1, keepdim=True))
    return (noise * torch.where(size > 0, size, 1.0) / noise.norm(dim=-1, keepdim=True)).to(first.dtype)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a module was called with, kept as it was before the call.

    Args:
        args: positional.
        kwargs: by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def at(self, place: int | str) -> Any:  # noqa: ANN401 - any module's input
        """Return what stands in a place."""
        return self.args[place] if isinstance(place, int) else self.kwargs[place]

    def like(self, tensor: torch.Tensor) -> frozenset[int | str]:
        """Return the places where a tensor of some shape and type stands."""
        places = (*range(len(self.args)), *self.kwargs)
        return frozenset(
            place
            for place in places
            for value in [self.at(place)]
            if isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
        )

    def holding(self, tensor: torch.Tensor | None) -> frozenset[int | str]:
        """Return the places where a tensor stands, bit for bit."""
        if tensor is None:
            return frozenset()
        return frozenset(place for place in self.like(tensor) if torch.equal(self.at(place), tensor))

    def call(self, module: nn.Module, changes: Mapping[int | str, torch.Tensor]) -> Any:  # noqa: ANN401
        """Call a module again, with other tensors in some places; fused norms write into what they are given."""
        args = [clone(changes.get(place, value)) for place, value in enumerate(self.args)]
        # Not through its hooks, which would act twice.
        return module.forward(*args, **{name: clone(changes.get(name, value)) for name, value in self.kwargs.items()})


@dataclass(frozen=True, slots=True)
class _Follower:
    """The call that read a layer's output.

    Args:
        module: that was called.
        inputs: it was given.
        outcome: it returned.
        ends: it is the final norm: what it hands on beside its result is read by nobody.
    """

    module: nn.Module
    inputs: _Inputs
    outcome: Any
    ends: bool

    def results(self, outcome: Any) -> list[torch.Tensor]:  # noqa: ANN401 - any module's output
        """Return the tensors of an outcome that matter."""
        found = list(_tensors(outcome))
        return found[:1] if self.ends else found


class _Trial:
    """Calls of one follower on changed inputs, each compared with what it computed on the real ones.

    Args:
        follower: to call.
        tolerance: largest change that is rounding.
    """

    def __init__(self, follower: _Follower, tolerance: float) -> None:
        self._follower, self._tolerance = follower, tolerance
        self._outcome = follower.results(follower.outcome)
        self._changes: list[float] = []

    @property
    def told(self) -> str:
        """By how much the changed inputs changed what it computed."""
        return "changes of " + ", ".join(f"{change:.2g}" for change in self._changes[1:])

    def check_repeatable(self) -> None:
        """Call it again as it was called.

        Raises:
            _Undecided: it computes something else then, so comparing tells nothing.
        """
        if not self.same({}):
            raise _Undecided("what follows it computes something else on the same input, in a run without a KV cache")

    def same(self, changes: Mapping[frozenset[int | str], torch.Tensor]) -> bool:
        """Whether changes make no difference."""
        return self._change(changes) <= self._tolerance

    def differs(self, changes: Mapping[frozenset[int | str], torch.Tensor]) -> bool:
        """Whether changes make a difference that is no rounding."""
        return self._change(changes) >= _DIFFERS

    def _change(self, changes: Mapping[frozenset[int | str], torch.Tensor]) -> float:
        each = {place: tensor for places, tensor in changes.items() for place in places}
        try:
            computed = self._follower.results(self._follower.inputs.call(self._follower.module, each))
        # It is anybody's code, called in a way that it may not expect.
        except Exception as exc:
            raise _Undecided(f"what follows it cannot be called again: {exc}") from exc
        if [t.shape for t in computed] != [t.shape for t in self._outcome] or not computed:
            raise _Undecided("what follows it returns other shapes when it is called again")
        change = max(_distance(new, old) for new, old in zip(computed, self._outcome, strict=True))
        self._changes.append(change)
        return change


def _distance(computed: torch.Tensor, real: torch.Tensor) -> float:
    """Return the relative L2 distance of the median row: one expert that rounding picks otherwise is not the rule."""
    width = real.shape[-1] if real.dim() else 1
    new, old = computed.double().reshape(-1, width), real.double().reshape(-1, width)
    change = (new - old).norm(dim=-1) / old.norm(dim=-1).clamp_min(1e-30)
    # What is not finite is no equal.
    return float(torch.nan_to_num(change, nan=torch.inf).median())


def _tensors(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - any module's output
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def clone(value: Any) -> Any:  # noqa: ANN401 - any module's input or output
    """Return a copy of a value whose tensors are its own; fused norms work in place on what they are given."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(clone(part) for part in value) if type(value) in {tuple, list} else value


@contextmanager
def quiet_attention(parts: ModelMap) -> Iterator[None]:
    """Let attention and other token mixers give fixed noise, whatever they compute.

    The noise comes from below everything that is laid over a module meanwhile, such as a tap.

    Args:
        parts: of the model.
    """
    with silenced(module for layer in range(len(parts.layers)) for module in parts.mixers(layer)):
        yield


@contextmanager
def silenced(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let some modules give fixed noise, whatever they compute.

    Args:
        modules: attention layers, or other mixers of tokens.
    """
    undo = [_silence(module) for module in modules]
    try:
        yield
    finally:
        for step in undo:
            step()


def _silence(module: nn.Module) -> Callable[[], None]:
    inner, previous = module.forward, module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: _noisy(inner(*args, **kwargs), args, kwargs)

    def undo() -> None:
        if previous is None:
            del module.forward
        else:
            module.forward = previous

    return undo


def _noisy(output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any module's values
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, torch.Tensor):
        return (_unit_noise(first), *output[1:]) if isinstance(output, tuple) else _unit_noise(first)
    # Some write into a tensor that they are given.
    target = kwargs.get("output", args[1] if len(args) > 1 else None)
    if output is None and isinstance(target, torch.Tensor) and target.is_floating_point():
        target.copy_(_unit_noise(target))
    return output


def _unit_noise(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)


class _Watch:
    """Decides each layer's stream at the moment at which its follower has run: later what that was given is gone.

    Args:
        parts: of the model.
    """

    def __init__(self, parts: ModelMap) -> None:
        self.outputs: dict[int, Any] = {}
        self.modes: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.order: list[int] = []
        self._given: dict[int, _Inputs] = {}
        self._parts = parts
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> None:
        chain = (*self._parts.layers, self._parts.final_norm)
        for place, module in enumerate(chain):
            self._hooks.append(module.register_forward_pre_hook(partial(self._entered, place), with_kwargs=True))
            if place > 0:
                self._hooks.append(module.register_forward_hook(partial(self._followed, place - 1)))
            if place + 1 < len(chain):
                self._hooks.append(module.register_forward_hook(partial(self._returned, place)))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _returned(self, layer: int, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        self.order.append(layer)
        self.outputs[layer] = clone(output)

    def _entered(self, place: int, _module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        self._given[place] = _Inputs(clone(args), {name: clone(value) for name, value in kwargs.items()})

    def _followed(self, layer: int, module: nn.Module, _args: Any, outcome: Any) -> Any:  # noqa: ANN401
        if layer not in self.outputs or layer in self.modes:
            return None
        # The run goes on with a copy: another call may use the same memory for its result.
        kept = clone(outcome)
        follower = _Follower(module, self._given[layer + 1], kept, ends=module is self._parts.final_norm)
        try:
            self.modes[layer] = _mode(self._given[layer], self.outputs[layer], follower)
        except _Undecided as exc:
            self.errors[layer] = str(exc)
        return kept
