"""What a worker of a bare server has that an engine worker's driver would bring: a ring, a publisher, and orders.

The publisher is a process beside the worker, `python -m engine_worker.sidecar`. It reads the same file, announces the
engine, and reads the ring; it drains it and ends when the worker does. When it dies by itself another takes its place:
it announces a new incarnation, by which consumers know that the streams of the old one are lost. The engine serves on.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from undercurrent.adapters.vllm import compat
from undercurrent.adapters.vllm.priority import NICE_ON_CPU, lower
from undercurrent.adapters.vllm.server_settings import ServerConfig
from undercurrent.adapters.vllm.sidecar import Sidecar, SidecarStart
from undercurrent.capture.ring import Ring
from undercurrent.capture.server_orders import ServerOrders

logger = logging.getLogger(__name__)


class ServerSide:
    """See the module. Made before the model is loaded; the publisher comes up meanwhile.

    Args:
        config: the server's file.
        worker: of vLLM.

    Raises:
        CaptureError: this server cannot be captured.
    """

    def __init__(self, config: ServerConfig, worker: Any) -> None:  # noqa: ANN401 - a vLLM worker
        compat.check_server(worker)
        self.ring = Ring.create(config.own.publisher.ring_mib << 20)
        self.orders = ServerOrders(config.rules)
        name, folder = compat.served_model(worker)
        self._nice = config.own.engine.nice
        self._ready_s = config.own.publisher.ready_s
        self._sidecar = Sidecar(
            SidecarStart(
                settings=str(config.path.resolve()),
                ring=self.ring.path,
                engine=f"{config.own.engine.name}.{compat.engine_place(worker)}",
                model=name,
                folder=folder if Path(folder).is_dir() else "",
                owner_pid=os.getpid(),
                # Those of the process that started the worker: vLLM binds none of that one's threads.
                cpus=tuple(sorted(os.sched_getaffinity(os.getppid()))),
            )
        )
        self._sidecar.start()
        self._lengths_are_told = False
        self._warned = False

    def slot(self, said: int) -> int:
        """Return where an API server of ours says how long a request is, -1 where there is none.

        Args:
            said: what stands beside the request; without such a server a client's own word, by which its rows would
                wait for as long as it likes.
        """
        if self._lengths_are_told:
            return said
        if not self._warned:
            self._warned = True
            logger.warning(
                "no API server says how long requests are, so rows behind a stop string leave too: it takes "
                "--middleware engine_worker.middleware.ControlMiddleware, and capture.confirm_lengths not to be false"
            )
        return -1

    def tell_lengths(self) -> tuple[str, int]:
        """Return path and inode of the ring to an API server that will say how long its requests are."""
        self._lengths_are_told = True
        return self.ring.path, Path(self.ring.path).stat().st_ino

    def wait_ready(self) -> None:
        """Wait until the publisher has announced itself; from then on it goes before the engine where they share cores.

        Raises:
            CaptureError: it says why it cannot, or does not get there in time.
        """
        self._sidecar.wait_ready(self._ready_s)
        nice = self._nice if self._nice is not None else NICE_ON_CPU if compat.computes_on_cpu() else 0
        if nice:
            # Not the thread that starts publishers: they would inherit it.
            lower(compat.engine_processes(), nice, spare=self._sidecar.thread_ids)
