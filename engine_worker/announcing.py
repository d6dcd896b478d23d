"""How an engine announces itself: the offset of its EngineStarted is its incarnation, which grows with every start."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from importlib.metadata import PackageNotFoundError, version

from engine_worker.outbox import Item, Outbox
from undercurrent.codec import Codec
from undercurrent.errors import UnreachableError
from undercurrent.kafka.publisher import Delivery, Publisher
from undercurrent.protocol.messages import EngineStarted
from undercurrent.topics import TopicPlan

ANNOUNCE_S = 60.0


def engine_started(engine: str) -> EngineStarted:
    """Return what a process says at its start.

    Args:
        engine: name of the engine among all of the pipeline.
    """
    return EngineStarted(
        engine=engine,
        started_at_us=time.time_ns() // 1000,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=_version(),
    )


async def announce(outbox: Outbox, plan: TopicPlan, engine: str) -> int:
    """Write an EngineStarted through an outbox; return the incarnation.

    Args:
        outbox: of the loop that this runs on.
        plan: the topics.
        engine: name of the engine.

    Raises:
        UnreachableError: it was not acknowledged in time.
    """
    written: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    outbox.send(plan.acks, 0, Item(engine.encode(), Codec().encode(engine_started(engine)), done=written.set_result))
    try:
        return await asyncio.wait_for(written, ANNOUNCE_S)
    except TimeoutError as exc:
        raise UnreachableError(f"{plan.acks} took no record within {ANNOUNCE_S:g} s") from exc


def announce_and_wait(publisher: Publisher, plan: TopicPlan, engine: str) -> int:
    """Write an EngineStarted where there is no loop; return the incarnation.

    Args:
        publisher: a client.
        plan: the topics.
        engine: name of the engine.

    Raises:
        UnreachableError: it was not acknowledged in time.
    """
    written: list[Delivery] = []
    value = Codec().encode(engine_started(engine))
    error = publisher.produce(plan.acks, value, key=engine.encode(), partition=0, on_delivery=written.append)
    if error is None:
        publisher.flush(ANNOUNCE_S)
        error = written[0].error if written else None
    if error is not None or not written:
        reason = "no answer" if error is None else error.reason
        raise UnreachableError(f"{plan.acks} took no record within {ANNOUNCE_S:g} s: {reason}")
    return written[0].offset


def _version() -> str:
    try:
        return version("undercurrent")
    except PackageNotFoundError:
        return "unknown"
