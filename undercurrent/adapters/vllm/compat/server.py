"""What capture reads of a bare vLLM server: which engine a worker is part of, and the requests of an API server."""

from __future__ import annotations

import copy
import functools
import logging
import multiprocessing
import os
from collections.abc import Mapping
from typing import Any, Protocol

from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker

from undercurrent.adapters.vllm.settings import CONFIG_KEY
from undercurrent.errors import CaptureError

logger = logging.getLogger(__name__)


class RequestsListener(Protocol):
    """Hears of the requests of one API server, on its event loop."""

    def adding(self, engine_id: str, external_id: str, index: int, raw: object) -> str | None:
        """A request is about to go to the engine.

        Args:
            engine_id: vLLM's own id of it; each child of a request has one.
            external_id: the id that vLLM answers with, equal for all children.
            index: child of its request.
            raw: the client's order, untrusted; None for none.

        Returns:
            The order that takes the place of the client's, None for no change.
        """

    def sent(self, engine_id: str) -> None:
        """The engine core has got it, or will get it before anything that is sent to it from now on."""


def check_server(worker: Any) -> None:  # noqa: ANN401 - a vLLM worker
    """Refuse what makes the ids of a bare server say less than capture relies on.

    Args:
        worker: of vLLM.

    Raises:
        CaptureError: by name.
    """
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        raise CaptureError("with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION clients choose the engine's ids: unset it")
    if worker.vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise CaptureError(
            "pipeline parallelism on a bare server: its stages would publish each for itself, and nobody could tell "
            "which of their layers belong together (run an engine worker)"
        )


def engine_place(worker: Any) -> str:  # noqa: ANN401 - a vLLM worker
    """Return which engine of its server a worker is part of, as part of a name."""
    return f"dp{worker.vllm_config.parallel_config.data_parallel_index}"


def engine_processes() -> list[int]:
    """Return the processes that compute for this worker and wait for it: its own, and the engine core's."""
    parent = multiprocessing.parent_process()
    core = [parent.pid] if parent is not None and parent.pid and parent.name.startswith("EngineCore") else []
    return [os.getpid(), *core]


def computes_on_cpu() -> bool:
    """Whether the engine shares its processors with everything else."""
    return bool(current_platform.is_cpu())


def served_model(worker: Any) -> tuple[str, str]:  # noqa: ANN401 - a vLLM worker
    """Return how a server calls its model, and the folder or the name that it was loaded from."""
    model = worker.vllm_config.model_config
    return str(model.served_model_name), str(model.model)


def plugin_is_loaded() -> bool:
    """Whether this process loaded our plugin; `VLLM_PLUGINS` may leave it out, here as in the workers."""
    return bool(getattr(gpu_worker.Worker.load_model, "_undercurrent_installed", False))


def additional_config_of(llm: Any) -> object:  # noqa: ANN401 - an AsyncLLM
    """Return the `additional_config` of an engine, as an API server knows it."""
    return llm.vllm_config.additional_config


def server_index_of(llm: Any) -> int:  # noqa: ANN401 - an AsyncLLM
    """Return which of its server's API-server processes an engine client belongs to."""
    return int(llm.engine_core.client_index)


def follow_requests(llm: Any, listener: RequestsListener) -> None:  # noqa: ANN401 - an AsyncLLM
    """Tell a listener of every request that this API server gives to its engine; nothing of it leaves as an error.

    Args:
        llm: the engine client.
        listener: hears.
    """
    processor, core = llm.output_processor, llm.engine_core
    add_output, add_core = processor.add_request, core.add_request_async

    @functools.wraps(add_output)
    def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own signature
        # A session that gets its prompt in parts comes with each of them.
        if request.sampling_params is not None and request.request_id not in processor.request_states:
            try:
                _tell(listener, request, int(kwargs.get("request_index", args[2] if len(args) > 2 else 0)))
            # The edge to vLLM: its request must run, whatever is wrong with us.
            except Exception:
                logger.exception("a request is not followed: an abort will not find it")
        return add_output(request, *args, **kwargs)

    @functools.wraps(add_core)
    async def add_request_async(request: Any) -> None:  # noqa: ANN401 - an EngineCoreRequest
        await add_core(request)
        try:
            listener.sent(request.request_id)
        # As above.
        except Exception:
            logger.exception("a request that was sent is not followed")

    processor.add_request = add_request
    core.add_request_async = add_request_async


def _tell(listener: RequestsListener, request: Any, index: int) -> None:  # noqa: ANN401 - an EngineCoreRequest
    params = request.sampling_params
    extra = params.extra_args if isinstance(params.extra_args, Mapping) else {}
    order = listener.adding(request.request_id, request.external_req_id, index, extra.get(CONFIG_KEY))
    if order is not None:
        # A copy: the children of a request share theirs.
        request.sampling_params = copy.copy(params)
        request.sampling_params.extra_args = {**extra, CONFIG_KEY: order}


class ServedRequests:
    """What can be asked and done with the requests of an API server; by vLLM's own ids.

    Args:
        llm: its engine client, an AsyncLLM.
    """

    def __init__(self, llm: Any) -> None:  # noqa: ANN401 - an AsyncLLM
        self._llm = llm

    def tokens_of(self, engine_id: str) -> int | None:
        """Return how many tokens of a request have come, None when it does not run here."""
        state = self._llm.output_processor.request_states.get(engine_id)
        if state is None or state.detokenizer is None:
            return None
        return int(state.detokenizer.num_output_tokens())

    async def abort(self, engine_id: str) -> None:
        """End a request: its client is answered at once, the engine stops in its next step."""
        await self._llm.abort(engine_id, internal=True)

    async def abort_in_core(self, engine_id: str) -> None:
        """Stop a request whose client was answered before the engine core had got it."""
        await self._llm.engine_core.abort_requests_async([engine_id])
