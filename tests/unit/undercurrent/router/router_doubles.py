"""Probes that do what a test says, and what hears of them."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np

from undercurrent.core import Probe, ProbeRegistry, ProbeResult
from undercurrent.router import Router
from undercurrent.spec import ActivationRecord, ExtractionPoint, InterventionPolicy, TensorType

LONG_S = 30.0
TENSOR = np.zeros(2, np.float32)


def record(token_pos=0, request_id="r1", point="mid"):
    return ActivationRecord(request_id, point, 4, token_pos, TensorType.RESIDUAL_STREAM, TENSOR, True)


def point(name="mid", **fields):
    return ExtractionPoint(name, 4, "residual_stream", "*", probe_type=fields.pop("probe_type", "scripted"), **fields)


def queued(name="mid", **fields):
    return point(name, execution_mode="async", **fields)


def blocking(name="mid", timeout_ms=30_000, on_timeout="continue", **fields):
    return point(name, intervention=InterventionPolicy("block_until_signal", timeout_ms, on_timeout), **fields)


class World:
    """What the probes of a test do, and what they were told."""

    def __init__(self):
        self.calls = defaultdict(list)
        self.started = threading.Event()
        self.threads = set()
        self.overlaps = 0
        self.on_record = lambda record: None
        self.on_start = lambda ctx: None
        self.on_end = lambda ctx: None
        self.registry = ProbeRegistry(entry_points=list)
        self.registry.register("scripted", scripted(self))

    def router(self, **options):
        return Router(self.registry, **{"worker_pool_size": 2} | options)

    def seen(self, request_id="r1", point="mid"):
        return [what for what in self.calls[request_id, point] if isinstance(what, int)]


def scripted(world):
    class Scripted(Probe):
        """Notes each call, then does what the world says."""

        def __init__(self, **settings):
            self.settings = settings
            self._inside = threading.Lock()

        def _enter(self, what):
            if not self._inside.acquire(blocking=False):
                world.overlaps += 1
                raise AssertionError("two calls at once")
            world.calls[self.request_id, self.extraction_point_name].append(what)
            world.threads.add(threading.current_thread().name)

        def on_start(self, ctx):
            self._enter("start")
            self._inside.release()
            world.on_start(ctx)

        def on_activation(self, record):
            self._enter(record.token_pos)
            try:
                world.started.set()
                return world.on_record(record)
            finally:
                self._inside.release()

        def on_end(self, ctx):
            self._enter("end")
            self._inside.release()
            made = world.on_end(ctx)
            return ProbeResult(self.request_id, self.extraction_point_name, "done") if made is None else made

    return Scripted


class Gate:
    """Holds a probe in its record until the test opens it."""

    def __init__(self, answer=None):
        self.reached = threading.Semaphore(0)
        self._open = threading.Semaphore(0)
        self.answer = answer

    def __call__(self, record):
        self.reached.release()
        assert self._open.acquire(timeout=LONG_S), "the test never opened the gate"
        return self.answer

    def wait(self):
        """Wait until a probe stands in the gate."""
        assert self.reached.acquire(timeout=LONG_S), "no probe came to the gate"

    def open(self, times=1):
        self._open.release(times)


class Call:
    """Runs a function on a thread of its own; `result` waits for it."""

    def __init__(self, function, *arguments):
        self._outcome = []
        self._thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
        self._thread.start()

    def _run(self, function, arguments):
        try:
            self._outcome.append((function(*arguments), None))
        except BaseException as exc:
            self._outcome.append((None, exc))

    @property
    def done(self):
        return bool(self._outcome)

    def result(self, timeout_s=LONG_S):
        self._thread.join(timeout_s)
        assert self._outcome, "the call did not return in time"
        value, error = self._outcome[0]
        if error is not None:
            raise error
        return value
