"""The publisher process, seen from the worker: start it, hear its reports, end it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine_worker.publisher import PublisherSettings
from engine_worker.publisher_streams import Identity
from undercurrent.errors import CaptureError
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.service.processes import tied_command
from undercurrent.service.sections import LoggingSection
from undercurrent.topics import TopicPlan

logger = logging.getLogger(__name__)

_END_S = 30.0


def publisher_settings(
    kafka: KafkaSettings,
    plan: TopicPlan,
    *,
    ring: str,
    identity: Identity,
    interval_ms: float,
    max_cycle_mib: int,
    max_held_mib: int = 32,
    blocking: Sequence[str] = (),
    logging: LoggingSection,
    late: bool = False,
    more_rings: Sequence[str] = (),
) -> PublisherSettings:
    """Return what a publisher of a pipeline is told at its start.

    Args:
        kafka: the connection.
        plan: the topics; every point of it is published.
        ring: path of the ring.
        identity: of the engine.
        interval_ms: least time from one drain of the ring to the next.
        max_cycle_mib: most bytes of records in one cycle, MiB.
        max_held_mib: most bytes of rows whose tokens nobody has seen yet, MiB.
        blocking: points with `overflow: block`.
        logging: how its log looks.
        late: an earlier publisher has read from this ring.
        more_rings: paths of the rings of further pipeline ranks.
    """
    topics = {point: plan.activations(point) for point in plan.points}
    # What the client refuses is lost though the topic would take it: records are split below the lower limit.
    kafka = kafka.with_room(plan.activation_bytes)
    most = min(plan.activation_bytes, int(kafka.options["message.max.bytes"]))
    return PublisherSettings(
        ring=ring,
        more_rings=tuple(more_rings),
        identity=identity,
        kafka={"bootstrap_servers": kafka.bootstrap_servers, **kafka.options},
        topics=topics,
        partitions=dict.fromkeys(topics, plan.activation_partitions),
        max_record_bytes=dict.fromkeys(topics, most),
        interval_ms=interval_ms,
        max_cycle_bytes=max_cycle_mib << 20,
        max_held_bytes=max_held_mib << 20,
        blocking=tuple(blocking),
        log_format=logging.format,
        log_level=logging.level,
        late=late,
    )


class PublishingListener(Protocol):
    """Hears on the loop's thread what the publisher reports."""

    def on_report(self, report: dict[str, Any]) -> None:
        """Streams that ended, counters: see `publisher.Report`."""

    def on_publisher_gone(self, error: BaseException) -> None:
        """The publisher has ended though nobody asked it to."""


class PublisherProcess:
    """A child that reads the ring; it dies with the thread that starts it.

    Args:
        post: runs a function on the loop's thread.
        listener: hears.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None], listener: PublishingListener) -> None:
        self._post = post
        self._listener = listener
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, None before it has started."""
        return None if self._process is None else self._process.pid

    def start(self, settings: PublisherSettings) -> None:
        """Start the process; call it from a thread that lives as long as the worker."""
        read_fd, write_fd = os.pipe()
        command = tied_command([sys.executable, "-m", "engine_worker.publisher", str(write_fd)])
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(write_fd,))
        os.close(write_fd)
        assert self._process.stdin is not None  # noqa: S101 - asked for above
        self._process.stdin.write(settings.to_json().encode() + b"\n")
        self._process.stdin.flush()
        self._thread = threading.Thread(target=self._listen, args=(read_fd,), name="publisher reports", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it has announced itself in every partition.

        Raises:
            CaptureError: it ended, or the broker did not take that in time.
        """
        if not self._ready.wait(timeout_s) or (self._process is not None and self._process.poll() is not None):
            raise CaptureError("the publisher process did not come up; its log says why")

    def end(self) -> None:
        """Let it drain the ring and end; kill it when that takes too long, or what it holds would be written late."""
        process = self._process
        if process is None:
            return
        self._ending = True
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            logger.warning("the publisher did not drain the ring within %g s; it is killed", _END_S)
            process.kill()
            process.wait()
        if self._thread is not None:
            self._thread.join(5.0)

    def _listen(self, fd: int) -> None:
        with os.fdopen(fd, "rb") as pipe:
            for line in pipe:
                report = json.loads(line)
                if report["ready"]:
                    self._ready.set()
                self._post(lambda report=report: self._listener.on_report(report))  # type: ignore[misc]
        self._ready.set()
        if not self._ending:
            error = CaptureError("the publisher process has ended; its log says why")
            self._post(lambda: self._listener.on_publisher_gone(error))
