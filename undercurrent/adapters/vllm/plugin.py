"""The `vllm.general_plugins` entry point: vLLM calls it in every process that it starts, before a model is loaded."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Prepare this process for capture; does nothing to an engine whose `additional_config` does not ask for it.

    Called twice it does nothing more. It never raises: a broken adapter must not stop a server that does not use it; an
    engine that asks for capture is refused when its worker loads the model.
    """
    try:
        from undercurrent.adapters.vllm import compat
    except ImportError as exc:
        logger.warning("activation capture is not available with this vLLM: %s", exc)
        return
    compat.install()
