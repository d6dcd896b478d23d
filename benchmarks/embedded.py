"""What probes in the caller's own process cost: `VLLMEngineAdapter` against plain vLLM, in paired visits.

    python -m benchmarks.embedded [--seconds 10] [--pairs 20] [--seed 1]

Sixteen threads keep a request each going through the adapter; plain vLLM gets the same prompts from sixteen coroutines,
and is stopped meanwhile (SIGSTOP). Each visit of a variant stands between two visits of plain vLLM. A probe that reads
one element of each row judges one layer of every token. The last line is one JSON object.

    unprobed   the adapter without extraction points
    inline     one layer, the probe runs in `route`
    async      one layer, the probe runs on the router's pool

Afterwards: how many rows an inline probe still gets after the one at which it asked for an abort, with 1 and with 16
requests in the engine.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.overhead import load
from benchmarks.overhead.figures import Ratios
from benchmarks.overhead.processes import EngineProcess
from undercurrent.adapters.vllm import VLLMEngineAdapter
from undercurrent.core import Probe, ProbeAction, ProbeRegistry, ProbeResult, ProbeSignal, RequestContext
from undercurrent.router import Router
from undercurrent.spec import ActivationRecord, ExecutionMode, ExtractionPoint
from undercurrent.testing.tiny_models import build_tiny_model

VARIANTS = ("unprobed", "inline", "async")
CONCURRENCY, TOKENS = 16, 64
_IDLE_S = 1.5  # vLLM spins for a second after its last message


class Sum(Probe):
    """Adds up an element of every row, and asks for an abort at the n-th row if told to."""

    def __init__(self, stop_at: int = 0) -> None:
        self.rows = 0
        self.total = 0.0
        self.stop_at = stop_at

    def on_activation(self, record: ActivationRecord) -> ProbeSignal | None:
        """Count it."""
        self.rows += 1
        self.total += float(record.tensor[0])
        return ProbeSignal(ProbeAction.ABORT) if self.rows == self.stop_at else None

    def on_end(self, ctx: RequestContext) -> ProbeResult:
        """Return how many rows there were."""
        return ProbeResult(self.request_id, self.extraction_point_name, self.rows)


def point_of(variant: str, stop_at: int = 0) -> list[ExtractionPoint]:
    """Return the points of a variant."""
    if variant == "unprobed":
        return []
    mode = ExecutionMode.ASYNC if variant == "async" else ExecutionMode.INLINE
    return [
        ExtractionPoint(
            name="p",
            layers=(2,),
            tensor_type="residual_stream",
            position="*" if not stop_at else "generated[*]",
            probe_type="sum",
            probe_args={"stop_at": stop_at},
            execution_mode=mode,
            queue_depth=4096 if variant == "async" else None,
        )
    ]


class Embedded:
    """The adapter under load."""

    def __init__(self, model: Path, stack: ExitStack) -> None:
        registry = ProbeRegistry()
        registry.register("sum", Sum)
        self.router = stack.enter_context(Router(registry))
        self.rows: dict[str, int] = {}
        self.router.on_request_end(
            lambda name, results: self.rows.update({name: results["p"].verdict} if results else {})
        )
        self.adapter = stack.enter_context(VLLMEngineAdapter())
        self.adapter.load_model(str(model), dtype=load.DTYPE, **load.ENGINE_ARGS)
        self._number = 0

    def visit(self, variant: str, seconds: float) -> float:
        """Return tokens per second."""
        tokens = [0] * CONCURRENCY
        started_s = time.monotonic()

        def user(number: int) -> None:
            rng = random.Random(f"{self._number}-{number}")
            while time.monotonic() - started_s < seconds:
                name = f"{variant}-{number}-{rng.getrandbits(64):x}"
                self._generate(name, point_of(variant), rng, TOKENS)
                tokens[number] += TOKENS

        self._number += 1
        self._at_once(CONCURRENCY, user)
        rate = sum(tokens) / (time.monotonic() - started_s)
        time.sleep(_IDLE_S)
        return rate

    def overruns(self, beside: int, count: int) -> list[int]:
        """Return the rows after the one that asked for an abort, of some requests in a row."""
        going = threading.Event()
        going.set()
        found = []

        def company(number: int) -> None:
            rng = random.Random(number)
            while going.is_set():
                self._generate(f"beside-{number}-{rng.getrandbits(64):x}", [], rng, TOKENS)

        threads = [threading.Thread(target=company, args=(n,)) for n in range(beside)]
        for thread in threads:
            thread.start()
        rng = random.Random(7)
        for number in range(count):
            name = f"stopped-{beside}-{number}"
            self._generate(name, point_of("inline", stop_at=8), rng, 200)
            found.append(self.rows[name] - 8)
        going.clear()
        for thread in threads:
            thread.join()
        return found

    def _generate(self, name: str, points: list[ExtractionPoint], rng: random.Random, tokens: int) -> None:
        prompt = "".join(chr(97 + rng.randrange(26)) for _ in range(rng.randrange(16, 33)))
        self.adapter.register_extraction(name, points)
        self.adapter.generate(name, prompt, {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}, self.router)
        self.adapter.unregister_extraction(name)

    @staticmethod
    def _at_once(count: int, work: object) -> None:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]  # type: ignore[arg-type]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="load of one visit")
    parser.add_argument("--pairs", type=int, default=20, help="most pairs of a variant")
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    options = parser.parse_args()
    order = random.Random(options.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = build_tiny_model("llama", folder / "model", layers=load.LAYERS, width=load.WIDTH, max_len=256)
        plain = EngineProcess(model, None)
        stack.callback(plain.close)
        embedded = Embedded(model, stack)

        def visit_plain(number: int) -> float:
            answer = plain.visit(options.seconds, number)
            plain.sleep()
            return float(answer["tokens"]) / (answer["ended_s"] - answer["started_s"])

        ratios = {variant: Ratios() for variant in VARIANTS}
        visit_plain(0)
        embedded.visit("inline", 1.0)
        before, number = visit_plain(1), 1
        while waiting := [v for v in VARIANTS if not ratios[v].settled(0.03, options.pairs)]:
            order.shuffle(waiting)
            for variant in waiting:
                number += 1
                rate = embedded.visit(variant, options.seconds)
                after = visit_plain(number)
                ratio = rate / ((before + after) / 2)
                ratios[variant].values.append(ratio)
                before = after
                print(f"{variant:10} {rate:8.0f} tok/s  plain {after:8.0f}  ratio {ratio:.3f}", flush=True)
        late = {f"rows_after_abort_{n + 1}": embedded.overruns(n, 30) for n in (0, CONCURRENCY - 1)}
        spread = {
            name: {"median": float(np.median(rows)), "p90": float(np.percentile(rows, 90)), "most": max(rows)}
            for name, rows in late.items()
        }
        print(json.dumps({f"ratio_{v}": ratios[v].as_json() for v in VARIANTS} | spread | {"versions": plain.versions}))


if __name__ == "__main__":
    main()
