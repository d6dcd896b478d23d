"""An event loop on a thread of its own, for synchronous callers of an asynchronous engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from undercurrent.errors import EngineDeadError

T = TypeVar("T")

# Each holds a request that starts or ends: its probes may take their time, and must not keep others from starting.
_HELPERS = 64
_JOIN_S = 30.0


class BackgroundLoop:
    """Runs coroutines of other threads.

    Args:
        name: of its thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix=f"{name}-helper")
        self.loop.set_default_executor(self._helpers)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine and wait for it; an interrupt of this thread cancels it.

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
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; its future may be cancelled from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine that nobody waits for; from the loop's own thread."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:  # noqa: ANN401 - the callback's own
        """Run a callback on the loop; from any thread."""
        self.loop.call_soon_threadsafe(callback, *args)

    def stop(self) -> None:
        """Stop the loop and its threads; what still runs on it is not waited for."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_JOIN_S)
        self._helpers.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


def result_of(future: Future[T], timeout_s: float | None = None) -> T:
    """Return what a coroutine on a background loop gave.

    Raises:
        EngineDeadError: it was cancelled, as everything is when the loop stops.
    """
    try:
        return future.result(timeout_s)
    except CancelledError as exc:
        raise EngineDeadError("the engine was shut down before this request had ended") from exc


async def to_the_end(function: Callable[..., T], *args: Any) -> T:  # noqa: ANN401 - the function's own
    """Run a function in a thread; a cancellation is heard only when it has returned.

    Args:
        function: blocking.
        args: its arguments.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
