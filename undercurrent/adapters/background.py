"""An event loop on a thread of its own, for synchronous callers of an asynchronous engine."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from undercurrent.errors import EngineDeadError, ProbeError

T = TypeVar("T")

# Each holds a request that starts or ends: its probes may take their time, may even generate with the same engine, and
# must not keep others from starting. Threads start as they are needed.
_HELPERS = 1024
_JOIN_S = 30.0
_CANCEL_S = 5.0
_WIND_UP_S = 1.0


class BackgroundLoop:
    """Runs coroutines of other threads.

    Whoever waits for one is answered in any case: where the loop ends first, by whatever means, with `EngineDeadError`.

    Args:
        name: of its thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix=f"{name}-helper")
        self.loop.set_default_executor(self._helpers)
        self._spawned: set[asyncio.Task[Any]] = set()
        # Of the loop's thread alone.
        self._tasks: dict[Future[Any], asyncio.Task[Any]] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._pid = os.getpid()
        self._open: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine and wait for it; an interrupt of this thread cancels it, and waits a moment for its end.

        Args:
            coroutine: to run on the loop.
            timeout_s: longest wait, None for no limit.

        Raises:
            EngineDeadError: the loop was stopped meanwhile.
            TimeoutError: it took longer.
        """
        future = self.submit(coroutine)
        try:
            return result_of(future, timeout_s)
        except BaseException:
            if not future.done():
                self.cancel(future)
                wait([future], _CANCEL_S)
            raise

    @property
    def is_here(self) -> bool:
        """Whether this is the process that has its threads."""
        return os.getpid() == self._pid

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; from any thread.

        Raises:
            EngineDeadError: the loop was stopped, or this process is a fork of the one that has it.
        """
        if not self.is_here:
            coroutine.close()
            raise EngineDeadError("the engine belongs to the process that this one was forked from")
        future: Future[T] = Future()
        with self._lock:
            if self._stopped:
                coroutine.close()
                raise EngineDeadError("the engine was shut down")
            self._open.add(future)
            self.loop.call_soon_threadsafe(self._start, coroutine, future)
        return future

    def cancel(self, future: Future[Any]) -> None:
        """Cancel a coroutine; its future is done when it has ended, not before. From any thread."""
        self.call_soon(self._cancel, future)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine that nobody waits for; from the loop's own thread."""
        task = self.loop.create_task(coroutine)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:  # noqa: ANN401 - the callback's own
        """Run a callback on the loop, unless it was stopped; from any thread."""
        with self._lock:
            if not self._stopped:
                self.loop.call_soon_threadsafe(callback, *args)

    def stop(self) -> None:
        """Stop the loop and its threads; what still runs on it is cancelled and waited for a moment."""
        with self._lock:
            stopped, self._stopped = self._stopped, True
            if not stopped:
                self.loop.call_soon_threadsafe(lambda: self.spawn(self._wind_up()))
        self._thread.join(_JOIN_S)
        self._helpers.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            self._answer_all()
        else:
            self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self._answer_all()

    def _answer_all(self) -> None:
        with self._lock:
            self._stopped = True
            left = list(self._open)
        for future in left:
            _give_up(future)

    async def _wind_up(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_WIND_UP_S)
        self.loop.stop()

    def _start(self, coroutine: Coroutine[Any, Any, Any], future: Future[Any]) -> None:
        task = self.loop.create_task(coroutine)
        self._tasks[future] = task
        task.add_done_callback(lambda _: self._ended(future, task))

    def _cancel(self, future: Future[Any]) -> None:
        task = self._tasks.get(future)
        if task is not None:
            task.cancel()

    def _ended(self, future: Future[Any], task: asyncio.Task[Any]) -> None:
        del self._tasks[future]
        self._open.discard(future)
        if future.done():
            return
        if task.cancelled():
            _give_up(future)
            return
        error = task.exception()
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


def _give_up(future: Future[Any]) -> None:
    """End a future that nothing will answer; whoever waits for it hears of it at once."""
    if not future.done() and future.cancel():
        future.set_running_or_notify_cancel()


def result_of(future: Future[T], timeout_s: float | None = None) -> T:
    """Return what a coroutine on a background loop gave.

    Raises:
        EngineDeadError: it was cancelled, as everything is when the loop stops.
    """
    try:
        return future.result(timeout_s)
    except CancelledError as exc:
        raise EngineDeadError("the engine was shut down before this request had ended") from exc


async def in_thread(function: Callable[..., T], *args: Any) -> T:  # noqa: ANN401 - the function's own
    """Run a function that calls probes in a thread.

    Args:
        function: blocking.
        args: its arguments.

    Raises:
        ProbeError: a probe raised what is no `Exception`, such as SystemExit: that would end this loop's thread.
    """
    return await asyncio.to_thread(_contained, function, *args)


async def to_the_end(function: Callable[..., T], *args: Any) -> T:  # noqa: ANN401 - the function's own
    """Do as `in_thread`; a cancellation is heard only when the function has returned.

    Args:
        function: blocking.
        args: its arguments.
    """
    running = asyncio.ensure_future(in_thread(function, *args))
    cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        # Asked for, so that nobody logs it as forgotten.
        running.exception()
        raise asyncio.CancelledError
    return running.result()


_inside = threading.local()


def calls_probes() -> bool:
    """Whether this thread is in the middle of `in_thread`: in a probe's start or end, or in a listener."""
    return getattr(_inside, "depth", 0) > 0


def _contained(function: Callable[..., T], *args: Any) -> T:  # noqa: ANN401 - the function's own
    _inside.depth = getattr(_inside, "depth", 0) + 1
    try:
        return function(*args)
    except Exception:
        raise
    except BaseException as exc:
        raise ProbeError(f"a probe or a listener raised {type(exc).__name__}: {exc}") from exc
