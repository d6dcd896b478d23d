"""How an engine announces itself: the offset of its EngineStarted is its incarnation, which grows with every start."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Container
from importlib.metadata import PackageNotFoundError, version

from engine_worker.outbox import Item, Outbox
from undercurrent.codec import Codec
from undercurrent.errors import EngineReplacedError, UnreachableError
from undercurrent.kafka.publisher import Delivery, Publisher
from undercurrent.protocol.messages import EngineStarted
from undercurrent.topics import TopicPlan

ANNOUNCE_S = 60.0


def engine_started(engine: str, *, retired: bool = False) -> EngineStarted:
    """Return what a process says at its start.

    Args:
        engine: name of the engine among all of the pipeline.
        retired: this is no start: nobody will use the name any more.
    """
    return EngineStarted(
        engine=engine,
        started_at_us=time.time_ns() // 1000,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=_version(),
        retired=retired,
    )


def replaced_by(
    message: EngineStarted, offset: int, *, engine: str, incarnation: int, publishers: Container[int]
) -> EngineReplacedError | None:
    """Return why a process must end when it reads a start, None when that does not concern it.

    Args:
        message: the start.
        offset: of it.
        engine: name of the process's engine.
        incarnation: of the process.
        publishers: process ids of its publishers: one that replaces a dead one announces itself under the same name.
    """
    if message.engine != engine or offset <= incarnation:
        return None
    if message.retired:
        return EngineReplacedError(engine, "was retired", offset)
    if message.host == socket.gethostname() and message.pid in publishers:
        return None
    return EngineReplacedError(engine, f"was started again on {message.host} (pid {message.pid})", offset)


async def announce(outbox: Outbox, plan: TopicPlan, engine: str, codec: Codec) -> int:
    """Write an EngineStarted through an outbox; return the incarnation.

    Args:
        outbox: of the loop that this runs on.
        plan: the topics.
        engine: name of the engine.
        codec: encodes.

    Raises:
        UnreachableError: it was not acknowledged in time.
    """
    written: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    outbox.send(plan.acks, 0, Item(engine.encode(), codec.encode(engine_started(engine)), done=written.set_result))
    try:
        return await asyncio.wait_for(written, ANNOUNCE_S)
    except TimeoutError as exc:
        raise UnreachableError(f"{plan.acks} took no record within {ANNOUNCE_S:g} s") from exc


def announce_and_wait(publisher: Publisher, acks: str, engine: str, codec: Codec, *, retired: bool = False) -> int:
    """Write an EngineStarted where there is no loop; return the incarnation.

    Args:
        publisher: a client.
        acks: the topic of acknowledgements.
        engine: name of the engine.
        codec: encodes.
        retired: see `engine_started`.

    Raises:
        UnreachableError: it was not acknowledged in time.
    """
    written: list[Delivery] = []
    value = codec.encode(engine_started(engine, retired=retired))
    error = publisher.produce(acks, value, key=engine.encode(), partition=0, on_delivery=written.append)
    if error is None:
        publisher.flush(ANNOUNCE_S)
        error = written[0].error if written else None
    if error is not None or not written:
        reason = "no answer" if error is None else error.reason
        raise UnreachableError(f"{acks} took no record within {ANNOUNCE_S:g} s: {reason}")
    return written[0].offset


def _version() -> str:
    try:
        return version("undercurrent")
    except PackageNotFoundError:
        return "unknown"
