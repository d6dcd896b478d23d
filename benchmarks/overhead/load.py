"""An engine in a process of its own, under closed-loop load when it is told to.

    python -m benchmarks.overhead.load '{"model": ..., "ring": ..., "layers": [...]}'

It answers each line `{"seconds": s, "concurrency": c, "tokens": t, "round": i, "captured": b}` on standard input with
one line on standard output: tokens, requests, positions that they computed, and the monotonic times of the first prompt
and the last token. With
`"time_taps": true` the answer has the CPU time of the taps in the model, too; the clock then costs something itself.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

from undercurrent.adapters.base import CaptureOrder, EngineRequest
from undercurrent.adapters.vllm.engine import VLLMEngine
from undercurrent.capture.ring import Ring
from undercurrent.protocol.messages import Sampling
from undercurrent.spec import parse_dict

POINT = "layers"
WIDTH, LAYERS, DTYPE = 256, 4, "bfloat16"
PARTITIONS = 4
ENGINE_ARGS = {
    "max_model_len": 256,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 1024,
    "enable_prefix_caching": False,
}


def spec_of(layers: list[int]) -> dict[str, Any]:
    """Return a spec of one point that reads every token at some layers."""
    point = {
        "name": POINT,
        "layers": layers,
        "tensor_type": "residual_stream",
        "position": "*",
        "execution_mode": "async",
        "queue_depth": 4096,
        "probe_type": "none",
    }
    return {"version": 1, "extraction_points": [point]}


async def visit(engine: VLLMEngine, task: dict[str, Any], *, captured: bool) -> dict[str, Any]:
    """Keep `concurrency` requests going for `seconds`, let the last ones end, and count."""
    rng = random.Random(task["round"])
    counts = {"tokens": 0, "requests": 0, "positions": 0}
    started_s = time.monotonic()

    async def user(number: int) -> None:
        while time.monotonic() - started_s < task["seconds"]:
            name = f"{task['round']}-{number}-{counts['requests']}-{rng.getrandbits(32):x}"
            order = CaptureOrder(request_id=name, attempt=1, points=(POINT,), partition=number % PARTITIONS)
            request = EngineRequest(
                engine_id=name,
                prompt_token_ids=tuple(rng.randrange(256) for _ in range(rng.randrange(16, 33))),
                sampling=Sampling(max_tokens=task["tokens"], temperature=0.0, ignore_eos=True),
                capture=order if captured else None,
            )
            counts["requests"] += 1
            async for delta in engine.submit(request):
                counts["tokens"] += len(delta.token_ids)
                counts["positions"] += len(delta.token_ids)
            # The last token is sampled and never computed.
            counts["positions"] += len(request.prompt_token_ids) - 1

    await asyncio.gather(*(user(number) for number in range(task["concurrency"])))
    return {**counts, "started_s": started_s, "ended_s": time.monotonic()}


def watch_taps(worker: Any) -> None:  # noqa: ANN401 - a vLLM worker
    """Put a clock around every tap of a worker, or set it to zero where it is there; runs inside it."""
    if hasattr(worker, "undercurrent_tap_ns"):
        worker.undercurrent_tap_ns[0] = 0
        return
    from undercurrent.adapters.vllm import tap
    from undercurrent.adapters.vllm.compat import runtime_of

    spent = worker.undercurrent_tap_ns = [0]
    plain = tap._of_output  # noqa: SLF001 - nothing else needs to see what a tap does

    def timed(*of: Any) -> Any:  # noqa: ANN401 - what a tap is made of
        take = plain(*of)

        def run(output: Any) -> None:  # noqa: ANN401 - any module's output
            began = time.thread_time_ns()
            take(output)
            spent[0] += time.thread_time_ns() - began

        return run

    taps = runtime_of(worker)._taps  # noqa: SLF001 - as above
    taps.remove()
    tap._of_output = timed  # noqa: SLF001 - as above
    taps.install()


def tap_ns(worker: Any) -> int:  # noqa: ANN401 - a vLLM worker
    """Return the CPU time of a worker's taps since `watch_taps`; runs inside it."""
    return int(worker.undercurrent_tap_ns[0])


async def main() -> None:
    """Start the engine, say so, and serve visits until standard input ends."""
    settings = json.loads(sys.argv[1])
    ring = Ring.open(settings["ring"]) if settings["ring"] else None
    points = parse_dict(spec_of(settings["layers"])).extraction_points if ring is not None else ()
    engine = VLLMEngine(settings["model"], engine_args={**ENGINE_ARGS, "dtype": DTYPE}, points=points, ring=ring)
    await engine.start()
    print(json.dumps({"ready": True, "versions": dict(engine.info.versions)}), flush=True)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            task = json.loads(line)
            if task["time_taps"]:
                await engine.collective_rpc(watch_taps)
            answer = await visit(engine, task, captured=ring is not None and task["captured"])
            if task["time_taps"]:
                answer["tap_us"] = (await engine.collective_rpc(tap_ns))[0] / 1000
            print(json.dumps(answer), flush=True)
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
