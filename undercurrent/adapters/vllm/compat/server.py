"""What capture reads of a bare vLLM server: which engine a worker is part of, and the requests of an API server."""

from __future__ import annotations

import copy
import functools
import logging
import multiprocessing
import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker

from undercurrent.adapters.vllm.settings import CONFIG_KEY, LENGTHS_CALL, SLOT_KEY
from undercurrent.errors import CaptureError

logger = logging.getLogger(__name__)


class RequestsListener(Protocol):
    """Hears of the requests of one API server, on its event loop."""

    def adding(self, engine_id: str, external_id: str, index: int, raw: object) -> tuple[str | None, int]:
        """A request is about to go to the engine.

        Args:
            engine_id: vLLM's own id of it; each child of a request has one.
            external_id: the id that vLLM answers with, equal for all children.
            index: child of its request.
            raw: the client's order, untrusted; None for none.

        Returns:
            The order that takes the place of the client's, None for no change; and where the request's length is told,
            below 0 for nowhere.
        """

    def counted(self, engine_id: str, length: int) -> None:
        """A request is so many tokens long by now, prompt and generated, as its client will be told."""

    def ended(self, engine_id: str) -> None:
        """A request will not grow any more, whatever the engine still computes; told once."""

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


async def length_tables(llm: Any) -> list[tuple[str, int]]:  # noqa: ANN401 - an AsyncLLM
    """Return path and inode of the ring of each engine that an API server sends requests to.

    Args:
        llm: the engine client.
    """
    call = llm.engine_core.call_utility_all_async
    told = await call("collective_rpc", LENGTHS_CALL, None, (), None)
    return [(str(ring[0]), int(ring[1])) for workers in told for ring in workers if ring is not None]


def api_servers_of(llm: Any) -> int:  # noqa: ANN401 - an AsyncLLM
    """Return how many API-server processes a server has."""
    return int(llm.engine_core.client_count)


def follow_requests(llm: Any, listener: RequestsListener) -> None:  # noqa: ANN401 - an AsyncLLM
    """Tell a listener of every request that this API server gives to its engine; nothing of it leaves as an error.

    Args:
        llm: the engine client.
        listener: hears.
    """
    _follow_lengths(llm.output_processor, listener)
    processor, core = llm.output_processor, llm.engine_core
    add_output, add_core = processor.add_request, core.add_request_async

    @functools.wraps(add_output)
    def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own signature
        # A session that gets its prompt in parts comes with each of them.
        known = request.request_id in processor.request_states
        if request.sampling_params is not None and not known:
            try:
                _tell(listener, request, int(kwargs.get("request_index", args[2] if len(args) > 2 else 0)))
            # The edge to vLLM: its request must run, whatever is wrong with us.
            except Exception:
                logger.exception("a request is not followed: an abort will not find it")
        try:
            return add_output(request, *args, **kwargs)
        finally:
            # A session that is over, or a request that vLLM refused in the end: it would keep its slot.
            if request.request_id not in processor.request_states:
                _end(listener, [request.request_id])

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


def _follow_lengths(processor: Any, listener: RequestsListener) -> None:  # noqa: ANN401 - an OutputProcessor
    process, abort = processor.process_outputs, processor.abort_requests

    @functools.wraps(process)
    def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own signature
        # Before: of a request that ends in it vLLM forgets the state. After: a stop string is found in it.
        states = [processor.request_states.get(output.request_id) for output in outputs]
        done = process(outputs, *args, **kwargs)
        try:
            for state in states:
                if state is not None and state.detokenizer is not None:
                    listener.counted(state.request_id, state.prompt_len + state.detokenizer.num_output_tokens())
            _end(listener, [s.request_id for s in states if s and s.request_id not in processor.request_states])
        # The edge to vLLM: its answers must go out, whatever is wrong with us.
        except Exception:
            logger.exception("the lengths of some requests are not told: their rows wait")
        return done

    @functools.wraps(abort)
    def abort_requests(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own signature
        aborted = abort(*args, **kwargs)
        _end(listener, aborted)
        return aborted

    processor.process_outputs = process_outputs
    processor.abort_requests = abort_requests


def _end(listener: RequestsListener, engine_ids: Iterable[str]) -> None:
    for engine_id in engine_ids:
        try:
            listener.ended(engine_id)
        # As above.
        except Exception:
            logger.exception("the end of a request is not told: its last rows wait")


def _tell(listener: RequestsListener, request: Any, index: int) -> None:  # noqa: ANN401 - an EngineCoreRequest
    params = request.sampling_params
    extra = params.extra_args if isinstance(params.extra_args, Mapping) else {}
    # A copy: the children of a request share theirs. What a client says under our own key is not for the worker.
    own = {key: value for key, value in extra.items() if key != SLOT_KEY}
    request.sampling_params = copy.copy(params)
    request.sampling_params.extra_args = own
    order, slot = listener.adding(request.request_id, request.external_req_id, index, extra.get(CONFIG_KEY))
    if order is not None:
        own[CONFIG_KEY] = order
    if slot >= 0:
        own[SLOT_KEY] = slot


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
