"""vLLM as an engine: its activations go, step by step, from the model runner into a shared-memory ring.

`plugin` is how vLLM finds us, `runtime` what runs in its worker, `compat` the only reader of its private names,
`engine` drives it for an engine worker, `adapter` inside a program of your own. Importing this package imports neither
vLLM nor torch.
"""

from undercurrent.adapters.base import EngineAdapter
from undercurrent.adapters.vllm.adapter import VLLMEngineAdapter
from undercurrent.errors import VLLMAdapterLimitationError

__all__ = ["EngineAdapter", "VLLMAdapterLimitationError", "VLLMEngineAdapter"]
