"""Where the model is compiled or captured: whether it is, in which sizes, and how to run it as if it were not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig

_NOT_COMPILED = "do_not_compile"


def in_graph(config: VllmConfig) -> bool:
    """Whether the model of an engine is compiled, or captured in CUDA graphs."""
    compilation = config.compilation_config
    return compilation.mode not in {None, CompilationMode.NONE} or has_cuda_graphs(config)


def has_cuda_graphs(config: VllmConfig) -> bool:
    """Whether steps of an engine are replayed from CUDA graphs."""
    return config.compilation_config.cudagraph_mode not in {None, CUDAGraphMode.NONE}


def graph_sizes(config: VllmConfig, most: int) -> list[int]:
    """Return rows of a step that between them meet every graph an engine has: captured, compiled, and of each range.

    Args:
        config: of the engine.
        most: most rows of a step.
    """
    compilation = config.compilation_config
    sizes = {1, most, *(compilation.cudagraph_capture_sizes or ()), *(compilation.compile_sizes or ())}
    for compiled in compilation.get_compile_ranges():
        sizes |= {compiled.start, compiled.end}
    # A size between the captured ones is padded to the next.
    return sorted({one for size in sizes for one in (size - 1, size) if 1 <= one <= most})


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Let a model run module by module, whatever it is compiled to, without compiling it."""
    compiled: list[Any] = [m for m in model.modules() if getattr(m, _NOT_COMPILED, None) is False]
    for module in compiled:
        setattr(module, _NOT_COMPILED, True)
    try:
        yield
    finally:
        for module in compiled:
            setattr(module, _NOT_COMPILED, False)
