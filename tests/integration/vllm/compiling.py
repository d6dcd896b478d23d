"""Lets vLLM keep compilation mode VLLM_COMPILE on a CPU: the mode of a GPU, with split graphs and a compile cache.

The CPU platform replaces it by a mode without a cache of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def keep_vllm_compile() -> Iterator[None]:
    """While it is open, engines of this process keep the mode that they ask for."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    replace_mode = CpuPlatform.check_and_update_config.__func__

    def keep_mode(cls: type, config: Any) -> None:
        asked = config.compilation_config.mode
        replace_mode(cls, config)
        if asked == CompilationMode.VLLM_COMPILE:
            config.compilation_config.mode = asked
            config.compilation_config.backend = "inductor"

    def no_pass(self: Any, graph: Any) -> None:
        """The pass looks for ops that only a GPU build has."""

    with (
        mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(keep_mode)),
        mock.patch.object(FixFunctionalizationPass, "__call__", no_pass),
    ):
        yield
