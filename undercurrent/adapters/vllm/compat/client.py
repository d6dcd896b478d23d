"""What the driver reads of vLLM's client: the ids of children, and what its shutdown leaves behind."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

logger = logging.getLogger(__name__)

_TERM_S = 5.0


def child_id(llm: Any, engine_id: str, index: int) -> str | None:  # noqa: ANN401 - an AsyncLLM
    """Return vLLM's own id of one child of a request, None where that child is not in the engine.

    Args:
        llm: the engine.
        engine_id: id under which the request was submitted; vLLM adds a random part, and the child's index.
        index: of the child.
    """
    processor = llm.output_processor
    for name in processor.external_req_ids.get(engine_id, ()):
        state = processor.request_states.get(name)
        if state is not None and state.request_index == index:
            return str(name)
    return None


async def quiet_before_shutdown(llm: Any) -> None:  # noqa: ANN401 - an AsyncLLM
    """Stop listening to an idle engine core, whose end would else be logged as its death.

    Args:
        llm: about to be shut down; with requests in flight nothing is done, they must hear of it.
    """
    if llm.output_handler is not None and llm.get_num_unfinished_requests() == 0:
        llm.output_handler.cancel()
        await asyncio.gather(llm.output_handler, return_exceptions=True)


async def close_client(llm: Any) -> None:  # noqa: ANN401 - an AsyncLLM
    """End the tasks of a vLLM client that was shut down, and the messaging context that it leaves open.

    Args:
        llm: shut down already; on the loop that it ran on.
    """
    client = llm.engine_core
    resources = client.resources
    tasks = [task for task in (llm.output_handler, resources.output_queue_task) if task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The sockets are closed, so this returns at once; if vLLM left one open it would wait for ever: not on this thread.
    thread = threading.Thread(target=resources.ctx.term, name="zmq-term", daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, _TERM_S)
    if thread.is_alive():
        logger.warning("vLLM left a socket open; its messaging context stays")
