"""What capture costs the engine's thread in a step, without an engine: the tracker alone on made-up schedules.

    python -m benchmarks.step_cost [--steps 2000] [--layers 1] [--position '*'] [--dtype model] [--python]

Requests of 64 tokens after a prompt of 16 to 32, at one point, by default of every token. `steady`: none begins or
ends. `churn`: each is followed by another as soon as it has ended, and they end one after the other, as under steady
load: with 256 requests four begin and four end in every step, with 16 one in every fourth. Between two steps a buffer
larger than the caches is read, which leaves them as a forward pass would or worse (`cold`), or nothing (`warm`).

Figures are CPU time of the thread in microseconds per step, opening and closing included: mean over all steps. `copy`
is the floor: the same rows copied once, with the same caches. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from undercurrent.capture import steady
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.spec import parse_dict

WIDTH, DTYPE = 256, "bfloat16"
GENERATED = 64
MAX_ROWS = 16_384
COLD_BYTES = 64 << 20
SOME, MANY = 16, 256


@dataclass(slots=True)
class _Running:
    """One request: its id, its prompt, positions that were computed, and those that were when it was opened."""

    name: str
    prompt: int
    computed: int = 0
    cached: int = 0


class Load:
    """A closed loop of requests, one slot each.

    Args:
        requests: at once.
        layers: of the point.
        churn: requests end after `GENERATED` tokens, and others take their slots.
        machine_code: as of the tracker.
        position: of the point.
        dtype: of the point.
    """

    def __init__(
        self, requests: int, layers: int, *, churn: bool, machine_code: bool, position: str = "*", dtype: str = "model"
    ) -> None:
        wanted = {"name": "p", "layers": list(range(layers)), "tensor_type": "residual_stream", "position": position}
        wanted |= {"execution_mode": "async", "probe_type": "none", "dtype": dtype}
        (spec,) = parse_dict({"version": 1, "extraction_points": [wanted]}).extraction_points
        point = CapturePoint.of(spec, layers=layers, width=WIDTH, model_dtype=DTYPE)
        self.rows = np.zeros((MAX_ROWS, point.group.row_bytes), np.uint8)
        self.ring = Ring.create(64 << 20)
        self.reader = self.ring.reader()
        self.tracker = Tracker((point,), {point.group: self.rows}, self.ring.writer(), machine_code=machine_code)
        self.batch = Batch(0, 0, [], *(np.zeros(MAX_ROWS + 1, np.int32) for _ in range(3)))
        self.churn = churn
        self._rng = random.Random(requests)
        self._number = 0
        self._names: list[str] = []
        self._running: list[_Running] = []
        self._leaving: deque[str] = deque()
        self._joining: deque[_Running] = deque()
        for at in range(requests):
            request = self._new()
            # Staggered, so that they end one after the other.
            request.cached = request.computed = request.prompt + (at * GENERATED // requests if churn else 0)
            self._running.append(request)
            self._names.append(request.name)
            self._open(request)

    def step(self) -> None:
        """Let the tracker see one step: who ended, who came, and the rows."""
        while self._leaving:
            self.tracker.close(self._leaving.popleft())
        while self._joining:
            self._open(self._joining.popleft())
        self.tracker.step(self.batch)

    def prepare(self) -> None:
        """Write down the batch of the next step, as an engine does."""
        batch, at = self.batch, 0
        batch.engine_ids = self._names
        for slot, request in enumerate(self._running):
            if self.churn and request.computed >= request.prompt + GENERATED:
                self._leaving.append(request.name)
                request = self._running[slot] = self._new()
                self._names[slot] = request.name
                self._joining.append(request)
            batch.starts[slot], batch.computed[slot] = at, request.computed
            count = 1 if request.computed else request.prompt
            at += count
            request.computed += count
        batch.starts[len(self._running)] = batch.rows = at
        batch.step += 1

    def drain(self) -> None:
        """Free the ring."""
        for _ in self.reader.read():
            pass
        self.reader.release()

    def _new(self) -> _Running:
        self._number += 1
        return _Running(f"request-{self._number}-abcdef", self._rng.randrange(16, 33))

    def _open(self, request: _Running) -> None:
        order = Order(request_id=request.name, attempt=1, points=("p",), partition=0)
        self.tracker.open(request.name, order, index=0, prompt_len=request.prompt, cached_prefix=request.cached)


def measure(load: Load, steps: int, disturb: Callable[[], object]) -> tuple[float, float]:
    """Return microseconds per step of the tracker, and of one copy of the same rows."""
    target = np.zeros_like(load.rows)
    spent = copied = 0
    for number in range(-50, steps):
        load.prepare()
        disturb()
        began = time.thread_time_ns()
        load.step()
        ended = time.thread_time_ns()
        rows = load.batch.rows
        disturb()
        again = time.thread_time_ns()
        target[:rows] = load.rows[:rows]
        done = time.thread_time_ns()
        if number >= 0:
            spent += ended - began
            copied += done - again
        load.drain()
    clock = _clock_us()
    return spent / steps / 1e3 - clock, copied / steps / 1e3 - clock


def _clock_us() -> float:
    """Return what two looks at the clock take by themselves."""
    began = time.thread_time_ns()
    for _ in range(1000):
        time.thread_time_ns()
    return (time.thread_time_ns() - began) / 1e6


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--position", default="*", help="of the point")
    parser.add_argument("--dtype", default="model", help="of the point")
    parser.add_argument("--python", action="store_true", help="without the machine code")
    options = parser.parse_args()
    trash = np.ones(COLD_BYTES // 8)
    figures: dict[str, object] = {"machine_code": steady.AVAILABLE and not options.python, "layers": options.layers}
    for caches, disturb in (("cold", trash.sum), ("warm", int)):
        steps = options.steps if caches == "warm" else options.steps // 4
        for requests in (SOME, MANY):
            for churn in (False, True):
                point = {"position": options.position, "dtype": options.dtype}
                load = Load(requests, options.layers, churn=churn, machine_code=not options.python, **point)
                took, copy = measure(load, steps, disturb)
                load.ring.close()
                name = f"{caches}_{requests}_{'churn' if churn else 'steady'}"
                figures[name], figures[f"{name}_copy"] = round(took, 1), round(copy, 1)
                print(f"{name:18} {took:8.1f} us per step, of which one copy of its rows {copy:6.1f}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
