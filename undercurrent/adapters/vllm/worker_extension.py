"""For stacks that name their extensions themselves: `--worker-extension-cls` with this class installs capture too.

Nothing here is needed where the `vllm.general_plugins` entry point is loaded, which is vLLM's default.
"""

from __future__ import annotations

from typing import Any

from undercurrent.adapters.vllm import compat
from undercurrent.errors import ProbingError, WorkerExtractionError
from undercurrent.spec import parse_dict

# vLLM imports this module before the worker loads its model: the moment to install.
compat.install()

__all__ = ["ProbingWorkerExtension", "WorkerExtractionError"]


class ProbingWorkerExtension:
    """Mixed into vLLM's worker; adds calls for `collective_rpc` and nothing that the worker already has."""

    def undercurrent_report(self) -> dict[str, Any]:
        """Return what the start-up self-check found.

        Raises:
            WorkerExtractionError: this engine was not asked to capture.
        """
        report: dict[str, Any] = self._undercurrent_runtime().report
        return report

    def undercurrent_set_points(self, spec: dict[str, Any]) -> str:
        """Let requests order exactly these points from now on; return why they cannot, empty when they can.

        Args:
            spec: as `spec.probe_spec_to_dict` gives it.
        """
        try:
            self._undercurrent_runtime().set_points(parse_dict(spec).extraction_points)
        # vLLM would send a traceback as text and no more: the reason travels as a value.
        except ProbingError as exc:
            return str(exc)
        return ""

    def _undercurrent_runtime(self) -> Any:  # noqa: ANN401 - a WorkerCapture
        runtime = compat.runtime_of(self)
        if runtime is None:
            raise WorkerExtractionError("this engine's additional_config does not ask for capture")
        return runtime
