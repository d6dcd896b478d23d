"""Engines with the V2 model runner; the folder v2_on_cpu must be on PYTHONPATH.

A process of its own, because Triton and vLLM decide at their import what this machine can do.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from every_point import every_points, expert_model, load, meets_a_stop, tempting_prompts
from inprocess import Ask, Capturing
from lora import build_adapter
from scenarios import Ahead, crowded, main, mixed, prompts, run, stopped

ON_V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
CROWD = {"num_gpu_blocks_override": 9, "max_num_seqs": 4}


def warmed(model: str, **engine_args: Any) -> dict[str, Any]:
    """Have vLLM send its warm-up requests, as it does where kernels are compiled; then look before any request."""
    from vllm import SamplingParams
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels

    original = CPUWorker.compile_or_warm_up_model
    sent: list[str] = []

    def warm_up(self: Any) -> Any:
        def execute_model(output: Any) -> Any:
            for request in output.scheduled_new_reqs:
                sent.append(request.req_id)
                # The interpreter cannot run the kernels of top-k and top-p, nor the one of grammars below.
                request.sampling_params = SamplingParams(temperature=0.0)
            return self.execute_model(output)

        def sample_tokens(_grammar: Any) -> Any:
            return self.sample_tokens(None)

        warmup_kernels(self.model_runner, execute_model, sample_tokens)
        run_mixed_prefill_decode_warmup(self.model_runner, execute_model, sample_tokens, 20)
        return original(self)

    CPUWorker.compile_or_warm_up_model = warm_up
    try:
        with Capturing(model, environment=ON_V2, **engine_args) as engine:
            stats = engine.ring.stats()
            frames = list(engine.log._reader.read())
            engine.log._reader.release()
            idle = {"steps": stats.steps, "frames": len(frames), "faults": len(engine.log.faults), "sent": sent}
            return {"idle": idle, "runs": engine.run(mixed()[:2]), "report": engine.ring.note}
    finally:
        CPUWorker.compile_or_warm_up_model = original


def cached(model: str) -> dict[str, Any]:
    """The same prompt again, and two children of it, where prefixes are cached; then an id that was aborted."""
    (prompt, other) = prompts(7, 70, 50)
    with Capturing(model, environment=ON_V2, enable_prefix_caching=True) as engine:
        first = engine.run([Ask("first", prompt)])
        again = engine.run([Ask("again", prompt), Ask("twins", prompt, params={"n": 2, "temperature": 1.0})])
        gone = engine.run([Ask("reused", prompt, abort_after=3, params={"max_tokens": 50})])
        reused = engine.run([Ask("reused", other, attempt=2)])
        return {"first": first, "again": again, "gone": gone, "reused": reused}


def adapters(model: str) -> dict[str, Any]:
    """Two LoRA adapters and the base in one batch; the adapters stay beside the model."""
    from vllm.lora.request import LoRARequest

    folder = Path(model).parent / "adapters-on-v2"
    made = {name: build_adapter(Path(model), folder / name, seed) for seed, name in enumerate(("red", "blue"), 1)}
    (prompt,) = prompts(8, 25)
    with Capturing(model, environment=ON_V2, enable_lora=True, max_loras=3, max_lora_rank=8) as engine:
        requests = {name: LoRARequest(name, n, str(path)) for n, (name, path) in enumerate(made.items(), 1)}
        names = (*made, "base")
        return {
            "adapters": made,
            "runs": engine.run([Ask(name, prompt, extra={"lora_request": requests.get(name)}) for name in names]),
        }


def every(model: str, kind: type[Capturing] = Capturing) -> dict[str, Any]:
    """Every tensor, selector and encoding, of a model with experts."""
    experts = expert_model(model)
    points = every_points(experts)
    return run(str(experts), to_a_stop, kind, points=points, environment=ON_V2) | {"points": points}


def to_a_stop(engine: Capturing) -> list[Ask]:
    """Return the load, and requests that generate a stop token: the interpreter runs no kernel that would allow few."""
    tried = {f"try{n}": prompt for n, prompt in enumerate(tempting_prompts(12))}
    greedy = {"max_tokens": 8}
    runs = engine.run([Ask(name, prompt, points=(), params=greedy) for name, prompt in tried.items()])
    found = [name for name, run in runs.items() if meets_a_stop(run)]
    return [*load(allowed_token_ids=None), *(Ask(f"stops-{n}", tried[n], params=greedy) for n in found[:2])]


def scenarios() -> dict[str, Any]:
    on_v2 = partial(run, environment=ON_V2)
    ahead = partial(on_v2, kind=Ahead)
    return {
        "mixed": lambda model: on_v2(model, mixed()),
        "crowded": lambda model: on_v2(model, crowded(), **CROWD),
        "stopped": lambda model: on_v2(model, stopped()),
        "warmed": warmed,
        "cached": cached,
        "adapters": adapters,
        "every": every,
        "async every": partial(every, kind=Ahead),
        "async mixed": lambda model: ahead(model, mixed()),
        "async crowded": lambda model: ahead(model, crowded(), **CROWD),
        "async stopped": lambda model: ahead(model, stopped()),
    }


if __name__ == "__main__":
    main(scenarios())
