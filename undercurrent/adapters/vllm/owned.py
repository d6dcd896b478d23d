"""What is different in vLLM's processes when `VLLMEngine` has started them: an engine core, and its workers.

They live in a process group of their own. Ctrl-C and a `kill` of the whole group then reach the owner alone, which lets
the running requests end before it stops the engine; in the owner's group the engine would stop first.

They end as soon as their work is over. Else each frees every module of torch and vLLM one by one, seconds of CPU time
apiece, and one waits for the other: on a busy machine longer than the owner waits before it kills.

They end with their owner, whatever they capture.

Like `compat` this reads private names of vLLM: the functions that it starts its processes with. They are replaced in
the owner and in the engine core, so a vLLM that was started by anything else is as it was.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from undercurrent.adapters.vllm.orphan import end_with

_VLLM_OWN = "_undercurrent_replaced"


def own_engine_cores() -> None:
    """Let this process own every engine core that it starts from now on. Called twice it does nothing more."""
    from vllm.v1.engine.core import EngineCoreProc

    _replace(EngineCoreProc, "run_engine_core", partial(_engine_core, os.getpid()))


def _engine_core(owner_pid: int, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own signature
    """Run an engine core; its process begins here."""
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    os.setpgid(0, 0)
    end_with(owner_pid)
    _replace(WorkerProc, "worker_main", _worker)
    run_and_leave(_original(EngineCoreProc, "run_engine_core"), *args, **kwargs)


def _worker(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own signature
    """Run a worker; its process begins here."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    run_and_leave(_original(WorkerProc, "worker_main"), *args, **kwargs)


def run_and_leave(main: Callable[..., object], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own
    """Call a process's function, and let the process end without freeing its modules once all else is done.

    The exit code is that of the function: 0, what `SystemExit` says, or 1 for any other exception.
    """
    code = 1

    def leave() -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    # The first one that is registered here is the last one that runs, when `multiprocessing` has cleaned up.
    atexit.register(leave)
    try:
        main(*args, **kwargs)
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        raise


def _replace(owner: type, name: str, function: Callable[..., None]) -> None:
    if not hasattr(owner, _VLLM_OWN):
        setattr(owner, _VLLM_OWN, staticmethod(getattr(owner, name)))
        setattr(owner, name, staticmethod(function))


def _original(owner: type, name: str) -> Callable[..., object]:
    # A process that was spawned has vLLM as it is; one that was forked has what its parent had replaced.
    original: Callable[..., object] = getattr(owner, _VLLM_OWN, None) or getattr(owner, name)
    return original
