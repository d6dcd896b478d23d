"""For stacks that name their extensions themselves: `--worker-extension-cls` with this class installs capture too.

Nothing here is needed where the `vllm.general_plugins` entry point is loaded, which is vLLM's default.
"""

from __future__ import annotations

from typing import Any

from undercurrent.adapters.vllm import compat
from undercurrent.errors import CaptureError

# vLLM imports this module before the worker loads its model: the moment to install.
compat.install()


class WorkerExtractionError(CaptureError):
    """A worker cannot capture what was asked for."""


class ProbingWorkerExtension:
    """Mixed into vLLM's worker; adds one call for `collective_rpc` and nothing that the worker already has."""

    def undercurrent_report(self) -> dict[str, Any]:
        """Return what the start-up self-check found.

        Raises:
            WorkerExtractionError: this engine was not asked to capture.
        """
        runtime = compat.runtime_of(self)
        if runtime is None:
            raise WorkerExtractionError("this engine's additional_config does not ask for capture")
        report: dict[str, Any] = runtime.report
        return report
