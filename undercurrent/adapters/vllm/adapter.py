"""vLLM inside the caller's own process, its activations in the caller's own router."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any, Literal

from undercurrent.adapters.base import OpenEngine
from undercurrent.adapters.embedded import EmbeddedAdapter
from undercurrent.adapters.vllm.engine import VLLMEngine
from undercurrent.adapters.vllm.version_check import check_vllm_version
from undercurrent.capture.ring import Ring
from undercurrent.errors import CaptureError, ConfigError, VLLMAdapterLimitationError

if TYPE_CHECKING:
    from undercurrent.router import Router

# A probe that is slow for longer than this costs its own request its records, never silently.
_BLOCK_TIMEOUT_S = 30.0


class VLLMEngineAdapter(EmbeddedAdapter):
    """Drives vLLM's async engine behind a synchronous `generate`; calls from several threads share its steps.

    It serves one model and one `Router` for its whole lifetime.

    Args:
        ring_bytes: memory between the engine's process and the router.
        tensors: what `ActivationRecord.tensor` is: a float32 tensor of torch on the CPU, or a NumPy array.
    """

    def __init__(self, *, ring_bytes: int = 64 << 20, tensors: Literal["torch", "numpy"] = "torch") -> None:
        super().__init__(ring_bytes=ring_bytes, tensors=tensors)
        self._router: Router | None = None

    def load_model(
        self,
        model_name_or_path: str,
        *,
        allow_unsupported_executor: bool = False,
        allow_v2_model_runner: bool = False,
        allow_request_id_randomization: bool = False,
        **kwargs: Any,  # noqa: ANN401 - vLLM's own arguments
    ) -> None:
        """Start vLLM.

        Args:
            model_name_or_path: folder or name.
            allow_unsupported_executor: accepted for programs that pass it, without effect: tensor parallelism needs
                no permission, and pipeline parallelism belongs to the engine worker.
            allow_v2_model_runner: accepted for programs that pass it; vLLM chooses its model runner in any case.
            allow_request_id_randomization: accepted for programs that pass it; vLLM's ids are left as they are in any
                case, since a request's order travels with it.
            **kwargs: fields of vLLM's AsyncEngineArgs, such as max_model_len; `nice` sets the niceness of vLLM's
                processes, `max_tap_bytes` the most memory for capture buffers, `v1_runner` chooses vLLM's V1 model
                runner, and `allow_untested` starts in a combination of modes that no test has run.

        Raises:
            VLLMAdapterLimitationError: a model is loaded already, or vLLM is configured in a way that cannot be
                captured; it names every reason.
            ConfigError: vLLM does not take its arguments, or a script loads the model where it is imported.
            CaptureError: the installed vLLM is none of those supported.
            EngineDeadError: vLLM did not come up.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # vLLM's process imports the script that starts it, which would start it again, and so on.
            raise ConfigError('load the model under `if __name__ == "__main__":`; vLLM imports this script once more')
        check_vllm_version()
        try:
            super().load_model(model_name_or_path, **kwargs)
        except VLLMAdapterLimitationError:
            raise
        except CaptureError as exc:
            raise VLLMAdapterLimitationError(str(exc)) from exc

    def _make_engine(self, model: str, ring: Ring, kwargs: dict[str, Any]) -> OpenEngine:
        if kwargs.get("pipeline_parallel_size", 1) != 1:
            raise CaptureError(
                "pipeline parallelism: each rank captures its own layers, and only probe hosts join them; "
                "run an engine worker, or use tensor_parallel_size"
            )
        ours = {
            name: kwargs.pop(name)
            for name in ("nice", "max_tap_bytes", "v1_runner", "allow_untested")
            if name in kwargs
        }
        return VLLMEngine(
            model, engine_args=kwargs, open_points=True, ring=ring, block_timeout_s=_BLOCK_TIMEOUT_S, **ours
        )

    def _check_router(self, router: Router) -> None:
        with self._lock:
            if self._router is None:
                self._router = router
            elif self._router is not router:
                raise VLLMAdapterLimitationError("one adapter serves one Router for its whole lifetime: make another")
