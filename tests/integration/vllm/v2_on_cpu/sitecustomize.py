"""Lets vLLM's V2 model runner run where there is no GPU: its Triton kernels run in Triton's interpreter.

Python imports a module of this name at start when its folder is on PYTHONPATH. Triton decides at its own import whether
it interprets, and vLLM whether Triton has a driver, so both must be told before: hence here, and in every process.
"""

import os

SWITCH = "UNDERCURRENT_V2_ON_CPU"


def install() -> None:
    """Tell Triton to interpret, and that it has a driver: one for the CPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from triton.backends import Backend, backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):
        """What vLLM and Triton ask of a driver when nothing is compiled."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 0)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_benchmarker(self) -> None:
            return None

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_device_interface(self) -> object:
            return torch.cpu

    compiler = next(iter(backends.values())).compiler
    backends["cpu"] = Backend(compiler=compiler, driver=InterpreterDriver)


if os.environ.get(SWITCH):
    install()
