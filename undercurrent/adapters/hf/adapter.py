"""A model of `transformers` inside the caller's own program: the reference of what an adapter does."""

from __future__ import annotations

from typing import Any

from undercurrent.adapters.embedded import EmbeddedAdapter
from undercurrent.adapters.hf.engine import HFEngine
from undercurrent.capture.ring import Ring


class HFEngineAdapter(EmbeddedAdapter):
    """Implements `EngineAdapter` with `transformers`: one request at a time, judged between any two tokens.

        with HFEngineAdapter() as adapter:
            adapter.load_model("openai-community/gpt2", dtype="float32")
            adapter.register_extraction("r1", points)
            text = adapter.generate("r1", "The capital of", {"max_tokens": 32}, router)

    The records of a token are routed before the next token is chosen. So when an inline probe asks for an abort, the
    text ends with the token that the probe judged, and nothing after it is computed. Other calls of `generate` wait
    their turn; `max_num_seqs` above 1 lets them share steps, and changes nothing else.

    `load_model` takes the fields of `adapters.hf.options.HFOptions`; `max_tap_bytes` sets the most memory for capture
    buffers.
    """

    _engine: HFEngine

    def _make_engine(self, model: str, ring: Ring, kwargs: dict[str, Any]) -> HFEngine:
        ours = {name: kwargs.pop(name) for name in ("max_tap_bytes",) if name in kwargs}
        self._engine = HFEngine(
            model,
            engine_args={"max_num_seqs": 1, **kwargs},
            ring=ring,
            open_points=True,
            after_step=self._drain,
            **ours,
        )
        return self._engine

    def _stop_now(self, engine_id: str) -> None:
        # On the model's own thread or beside it: either way before its next forward pass.
        self._engine.abort_now(engine_id)
