"""The publisher process, seen from the worker: start it, hear its reports, replace it when it dies, end it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from engine_worker.publisher_cycle import Bound
from engine_worker.publisher_messages import Identity
from engine_worker.publisher_telling import PublisherSettings
from undercurrent.errors import CaptureError
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.service.processes import tied_command
from undercurrent.service.sections import LoggingSection
from undercurrent.spec import ExtractionPoint, Overflow
from undercurrent.topics import TopicPlan

logger = logging.getLogger(__name__)

_END_S = 30.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_WELL_S = 60.0


def publisher_settings(
    kafka: KafkaSettings,
    plan: TopicPlan,
    *,
    ring: str,
    identity: Identity,
    interval_ms: float,
    max_cycle_mib: int,
    max_buffer_mib: int = 256,
    max_held_mib: int = 32,
    points: Iterable[ExtractionPoint] = (),
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
        max_buffer_mib: most bytes that wait while a cycle is in flight, MiB.
        max_held_mib: most bytes of rows whose tokens nobody has seen yet, MiB.
        points: of the pipeline, which say what happens when too much waits.
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
        kafka=kafka.keys(),
        topics=topics,
        partitions=dict.fromkeys(topics, plan.activation_partitions),
        max_record_bytes=dict.fromkeys(topics, most),
        interval_ms=interval_ms,
        max_cycle_bytes=max_cycle_mib << 20,
        max_buffer_bytes=max_buffer_mib << 20,
        max_held_bytes=max_held_mib << 20,
        bounds={point.name: Bound(point.overflow or Overflow.DROP_NEWEST, point.queue_depth) for point in points},
        acks=plan.acks,
        log_format=logging.format,
        log_level=logging.level,
        late=late,
    )


class PublishingListener(Protocol):
    """Hears on the loop's thread what the publisher reports."""

    def on_report(self, report: dict[str, Any]) -> None:
        """Streams that ended, counters: see `publisher_telling.Report`."""

    def on_publisher_gone(self, error: BaseException) -> None:
        """The publisher has ended though nobody asked it to; another one comes under an incarnation of its own."""


class PublisherProcess:
    """A child that reads the ring, and another one whenever it dies; the last of them dies with this process.

    Nothing of the engine waits for any of this: what it captures stands in the ring until somebody reads it.

    Args:
        post: runs a function on the loop's thread.
        listener: hears.
        program: what runs as the process; it gets the file descriptor that it reports on as an argument.

    Attributes:
        pids: of every process that it has started.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        listener: PublishingListener,
        program: Sequence[str] = (sys.executable, "-m", "engine_worker.publisher"),
    ) -> None:
        self._post = post
        self._listener = listener
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self.pids: set[int] = set()
        self._ready = threading.Event()
        self._spawned = threading.Event()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, None before it has started."""
        return None if self._process is None else self._process.pid

    def start(self, settings: PublisherSettings) -> None:
        """Start the process; `wait_ready` says whether it came up."""
        # A child dies with the thread that started it, and this one lives as long as it is to have any.
        self._thread = threading.Thread(target=self._keep, args=(settings,), name="publisher", daemon=True)
        self._thread.start()
        self._spawned.wait()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it has announced itself in every partition.

        Raises:
            CaptureError: it ended, or the broker did not take that in time.
        """
        if not self._ready.wait(timeout_s) or self._process is None or self._process.poll() is not None:
            raise CaptureError("the publisher process did not come up; its log says why")

    def end(self) -> None:
        """Let it drain the ring and end; kill it when that takes too long, or what it holds would be written late."""
        with self._lock:
            self._ending.set()
            process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            logger.warning("the publisher did not drain the ring within %g s; it is killed", _END_S)
            process.kill()
            process.wait()
        if self._thread is not None:
            self._thread.join(5.0)

    def _keep(self, settings: PublisherSettings) -> None:
        """Run processes one after the other, until the end is asked for or the first does not get ready."""
        pause_s = _FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            try:
                self._run(settings)
            except OSError as exc:  # no memory, files or process ids: in a moment there may be some
                logger.error("the publisher process cannot be started: %s", exc)
            self._spawned.set()
            first, settings = not settings.late, replace(settings, late=True)
            ready = self._ready.is_set()
            self._ready.set()
            if self._ending.is_set() or (first and not ready):
                return
            error = CaptureError("the publisher process has ended, its log says why; another one comes")
            self._post(lambda error=error: self._listener.on_publisher_gone(error))  # type: ignore[misc]
            # One that lived for long was well: the next is not waited for longer on its account.
            pause_s = _FIRST_PAUSE_S if time.monotonic() - began_s > _WELL_S else min(2 * pause_s, _LONGEST_PAUSE_S)
            if self._ending.wait(pause_s):
                return

    def _run(self, settings: PublisherSettings) -> None:
        """Run one process to the end of the pipe that it reports on."""
        read_fd, write_fd = os.pipe()
        with os.fdopen(read_fd, "rb") as pipe:
            try:
                process = self._spawn(write_fd)
            finally:
                os.close(write_fd)
            if process is None:
                return
            assert process.stdin is not None  # noqa: S101 - asked for in `_spawn`
            self._spawned.set()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(settings.to_json().encode() + b"\n")
                process.stdin.flush()
            for line in pipe:
                if not line.endswith(b"\n"):
                    break  # it died in the middle of a word
                report = json.loads(line)
                if report["ready"]:
                    self._ready.set()
                self._post(lambda report=report: self._listener.on_report(report))  # type: ignore[misc]
        process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()

    def _spawn(self, write_fd: int) -> subprocess.Popen[bytes] | None:
        """Start a process that reports on a file descriptor; None where the end was asked for."""
        command = tied_command([*self._program, str(write_fd)])
        with self._lock:
            if self._ending.is_set():
                return None
            process = self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(write_fd,))
            self.pids.add(process.pid)
        return process
