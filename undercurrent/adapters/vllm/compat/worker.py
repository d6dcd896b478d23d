"""What is done to vLLM's worker: one method of its class is wrapped, the rest happens on the instance later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.worker import gpu_worker

from undercurrent.adapters.vllm.settings import settings_of

_INSTALLED = "_undercurrent_installed"
_SETTINGS = "_undercurrent_settings"
_RUNTIME = "_undercurrent_capture"
_WEIGHT_CHANGES = ("reload_weights", "start_weight_update", "update_weights", "reset_weights", "checkpoint_restore")


def install() -> None:
    """Wrap `Worker.load_model` once, so that an engine that asks for capture gets its taps when its model is there."""
    worker_class = gpu_worker.Worker
    original = worker_class.load_model
    if getattr(original, _INSTALLED, False):
        return

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own signature
        # What was read once is kept: it is not in the configuration any more.
        settings = getattr(self, _SETTINGS, None) or settings_of(self.vllm_config.additional_config)
        if settings is None:
            return original(self, *args, **kwargs)
        from undercurrent.adapters.vllm.runtime import attach

        setattr(self, _SETTINGS, settings)
        finish = attach(self, settings)
        result = original(self, *args, **kwargs)
        finish()
        return result

    setattr(load_model, _INSTALLED, True)
    worker_class.load_model = load_model


def runtime_of(worker: Any) -> Any:  # noqa: ANN401 - a vLLM worker
    """Return what `keep_runtime` kept on a worker, or None."""
    return getattr(worker, _RUNTIME, None)


def keep_runtime(worker: Any, runtime: object) -> None:  # noqa: ANN401 - a vLLM worker
    """Keep the capture runtime as long as its worker lives."""
    setattr(worker, _RUNTIME, runtime)


def answer_calls(worker: Any, name: str, answer: Callable[[], object]) -> None:  # noqa: ANN401 - a vLLM worker
    """Have a worker answer a `collective_rpc` of a name.

    Args:
        worker: of vLLM.
        name: of the method.
        answer: gives what is sent back.
    """
    setattr(worker, name, answer)


def watch_weights(worker: Any, changes: Callable[[str], None]) -> None:  # noqa: ANN401 - a vLLM worker
    """Call a function before anything that gives the model other weights.

    What changes them behind vLLM's back, such as a function sent by `collective_rpc`, is not seen.

    Args:
        worker: of vLLM; its calls come between steps.
        changes: gets the name of the worker's method; may not raise.
    """
    for name in _WEIGHT_CHANGES:
        original = getattr(worker, name, None)
        if original is not None:
            setattr(worker, name, _told(original, name, changes))


def _told(original: Callable[..., Any], name: str, changes: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own signature
        changes(name)
        return original(*args, **kwargs)

    return method
