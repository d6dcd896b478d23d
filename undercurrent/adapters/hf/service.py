"""The one thread that runs the model: it serves several requests in turn, a step at a time.

A step computes the pending tokens of every running request, each in a forward pass of its own, as far as the row limit
of the step goes; those that it leaves out come first in the next one. Then the rows are in the ring, `after_step` is
called, and only then the next tokens are chosen: whoever aborts a request from within `after_step` stops it before its
next token.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from undercurrent.adapters.base import EngineDelta
from undercurrent.adapters.hf.capture import HFCapture
from undercurrent.adapters.hf.model import LoadedModel
from undercurrent.adapters.hf.options import HFOptions
from undercurrent.adapters.hf.running import Running
from undercurrent.errors import BadRequestError, EngineDeadError

logger = logging.getLogger(__name__)

_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class Parts:
    """What the thread works with, made by it.

    Args:
        loaded: the model.
        capture: None where nothing can be captured.
    """

    loaded: LoadedModel
    capture: HFCapture | None


@dataclass(frozen=True, slots=True)
class _Call:
    work: Callable[[], Any]
    done: Future[Any]


class Service:
    """See the module.

    Args:
        build: loads the model; called on the thread.
        options: of the engine.
        after_step: called on the thread between a step's rows and its tokens.
    """

    def __init__(
        self, build: Callable[[], Parts], options: HFOptions, after_step: Callable[[], None] | None = None
    ) -> None:
        self._build = build
        self._options = options
        self._after_step = after_step
        self._ready: Future[Parts] = Future()
        self._lock = threading.Lock()
        self._error: EngineDeadError | None = None
        self._children: dict[str, Sequence[Running]] = {}
        self._inbox: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._stopping = False
        # Below: of the thread alone.
        self._waiting: list[Running] = []
        self._running: list[Running] = []
        self.steps = 0
        self._thread = threading.Thread(target=self._run, name="undercurrent-model", daemon=True)

    # From any thread

    def start(self) -> Future[Parts]:
        """Start the thread; the answer comes when the model is loaded."""
        self._thread.start()
        return self._ready

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Have something done between two steps.

        Raises:
            EngineDeadError: there will be no more steps.
        """
        done: Future[Any] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._inbox.put(_Call(work, done))
        return done

    def add(self, engine_id: str, children: Sequence[Running]) -> None:
        """Run the children of a request.

        Raises:
            BadRequestError: one with this id runs.
            EngineDeadError: the engine is gone.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if engine_id in self._children:
                raise BadRequestError(f"request {engine_id!r:.80} is running already")
            self._children[engine_id] = tuple(children)
            self._inbox.put(_Call(lambda: self._waiting.extend(children), Future()))

    def abort(self, engine_id: str, index: int | None = None) -> None:
        """Stop a request, or one child of it, before its next forward pass. An unknown id is nothing."""
        with self._lock:
            for child in self._children.get(engine_id, ()):
                if index in {None, child.index}:
                    child.aborted = True

    def check_alive(self) -> None:
        """Raise why there are no more steps, if that is so."""
        if self._error is not None:
            raise self._error

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step that it is in; requests that run end with `EngineDeadError`."""
        self._stopping = True
        self._inbox.put(_Call(lambda: None, Future()))
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("the model is still in a forward pass after %g s; its thread is left behind", timeout_s)
        self._die(EngineDeadError("the engine was closed"))
        # It holds the model.
        self._ready = Future()

    # On the thread

    def _run(self) -> None:
        ready = self._ready
        ready.set_running_or_notify_cancel()
        try:
            parts = self._build()
        # The thread's edge: whoever waits for the start gets it, whatever it is.
        except BaseException as exc:
            self._die(EngineDeadError(f"the engine did not start: {exc}"))
            ready.set_exception(exc)
            return
        ready.set_result(parts)
        try:
            while self._take_calls(parts.capture):
                self._admit(parts)
                if self._running:
                    self._step(parts)
        # The same edge: no request can go on without this thread.
        except BaseException as exc:
            logger.exception("the model's thread has ended")
            error = EngineDeadError(f"the model's thread ended: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            self._die(error)

    def _take_calls(self, capture: HFCapture | None) -> bool:
        """Do what was asked for, waiting for it when there is nothing to run; return whether to go on."""
        while not self._stopping:
            try:
                call = self._next_call(capture)
            except queue.Empty:
                return not self._stopping
            if not call.done.set_running_or_notify_cancel():
                continue
            try:
                call.done.set_result(call.work())
            # It belongs to whoever called.
            except Exception as exc:
                call.done.set_exception(exc)
        return False

    def _next_call(self, capture: HFCapture | None) -> _Call:
        if self._running or self._waiting:
            return self._inbox.get_nowait()
        while capture is not None and capture.waiting:
            try:
                return self._inbox.get(timeout=_RETRY_S)
            except queue.Empty:
                capture.idle(self.steps)
        return self._inbox.get()

    def _admit(self, parts: Parts) -> None:
        for child in [child for child in self._waiting if child.aborted]:
            self._waiting.remove(child)
            self._end(child, child.abort(), parts.capture)
        room = self._options.max_num_seqs - len(self._running)
        if room <= 0 or not self._waiting:
            return
        # Stable: first come, first served among equals.
        self._waiting.sort(key=lambda child: child.request.priority)
        for child in self._waiting[:room]:
            child.cache = parts.loaded.new_cache()
            if parts.capture is not None:
                parts.capture.open(child)
            self._running.append(child)
        del self._waiting[:room]

    def _step(self, parts: Parts) -> None:
        self.steps += 1
        capture = parts.capture
        if capture is not None:
            capture.begin(self.steps)
        computed = self._forward_all(parts)
        if capture is not None:
            capture.write()
        if self._after_step is not None:
            self._call_after_step()
        for child, logits in computed:
            if not child.aborted and child.pending == 0:
                delta = self._advance(child, logits)
                if delta.finish_reason is None:
                    child.mailbox.put(delta)
                else:
                    self._running.remove(child)
                    self._end(child, delta, capture)
        for child in [child for child in self._running if child.aborted]:
            self._running.remove(child)
            self._end(child, child.abort(), capture)

    def _advance(self, child: Running, logits: Any) -> EngineDelta:  # noqa: ANN401 - a tensor
        try:
            return child.advance(logits)
        # Such as logits that are no numbers: an end that nobody asked for, of this request alone.
        except Exception:
            logger.exception("no token of request %s can be chosen", child.request.engine_id)
            return child.abort()

    def _forward_all(self, parts: Parts) -> list[tuple[Running, Any]]:
        left = parts.capture.max_rows if parts.capture is not None else self._options.max_num_batched_tokens
        computed: list[tuple[Running, Any]] = []
        left_out: list[Running] = []
        for child in self._running:
            count = min(child.pending, left)
            if count == 0:
                left_out.append(child)
            elif not child.aborted:
                computed.append((child, self._forward(parts, child, count)))
                left -= count
        if left_out:
            self._running = left_out + [child for child in self._running if child not in left_out]
        return computed

    def _forward(self, parts: Parts, child: Running, count: int) -> Any:  # noqa: ANN401 - a tensor
        inputs = child.inputs(count)
        if parts.capture is not None:
            parts.capture.arm(child, inputs)
        logits = parts.loaded.forward(inputs, child.cache)
        if parts.capture is not None:
            parts.capture.disarm(child)
        child.computed += count
        return logits

    def _call_after_step(self) -> None:
        try:
            if self._after_step is not None:
                self._after_step()
        # Somebody else's code: it must not end the requests of everybody.
        except Exception:
            logger.exception("what is called after each step failed")

    def _end(self, child: Running, delta: EngineDelta, capture: HFCapture | None) -> None:
        """Close what belongs to a child, then say its last word."""
        if capture is not None:
            capture.close(child)
        child.cache = None
        with self._lock:
            left = [other for other in self._children.get(child.request.engine_id, ()) if other is not child]
            if left:
                self._children[child.request.engine_id] = left
            else:
                self._children.pop(child.request.engine_id, None)
        child.mailbox.put(delta)

    def _die(self, error: EngineDeadError) -> None:
        """Tell everybody who waits, once."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            children = [child for group in self._children.values() for child in group]
            self._children.clear()
        for mailbox in {child.mailbox for child in children}:
            mailbox.put(error)
        while True:
            try:
                call = self._inbox.get_nowait()
            except queue.Empty:
                return
            if call.done.set_running_or_notify_cancel():
                call.done.set_exception(error)
