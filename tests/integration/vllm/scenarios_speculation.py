"""An engine with ngram speculation, in a process of its own: vLLM cannot start another one where Numba was imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from harness import POINTS, point
from inprocess import Ask, Capturing, Ran
from scenarios import main, watch

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
AGAIN_AND_AGAIN = [9, 10, 11] * 20
LAST = point("last", "residual_stream", (2,), "generated[-1]")


class Drafts:
    """What became of the drafts, read where the runner has it."""

    def __init__(self, runner: Any) -> None:
        self.accepted = self.rejected = 0
        self._runner = runner
        self._original = runner._bookkeeping_sync
        runner._bookkeeping_sync = self._note

    def _note(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._original(output, *args, **kwargs)
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            accepted = len(result[3][self._runner.input_batch.req_id_to_index[name]]) - 1
            self.accepted += accepted
            self.rejected += len(drafts) - accepted
        return result


def repetitive(prefix: str) -> list[Ask]:
    noise = np.random.default_rng(1).integers(0, 256, 32).tolist()
    prompts = [[5, 6, 7, 8] * 8, AGAIN_AND_AGAIN, noise[:20], [1, 2] * 30, noise[20:] * 6]
    return [
        Ask(f"{prefix}{i}", prompt, after=i, params={"max_tokens": 30 + 5 * i, "temperature": 1.0 if i == 3 else 0.0})
        for i, prompt in enumerate(prompts)
    ]


def one(engine: Capturing, name: str, prompt: Sequence[int], **params: Any) -> Ran:
    return engine.run([Ask(name, prompt, params=params)])[name]


def accepted(run: Ran) -> list[int]:
    """Return the generated tokens that were accepted drafts, with at least one accepted after them in their step."""
    steps = run.streams["generated"].steps
    return [n for n in range(1, len(steps) - 1) if steps[n - 1] == steps[n] == steps[n + 1]]


def looping(engine: Capturing) -> tuple[Ran, int]:
    """Return a request and one of its `accepted` tokens that it had not generated before."""
    for seed in range(20):
        # What the model says again and again is drafted at once where the prompt says it already.
        prompt = np.random.default_rng(seed).integers(0, 256, 20).tolist()
        loop = one(engine, f"loop{seed}", prompt, max_tokens=100).sequence
        run = one(engine, f"free{seed}", loop, max_tokens=60)
        generated = run.sequence[len(loop) :]
        for n in accepted(run):
            if generated[n] not in generated[:n]:
                return run, n
    raise AssertionError("the model never repeats more than one token")


def stops(engine: Capturing) -> dict[str, Any]:
    """End at tokens that came in the middle of a step, after which more drafts were accepted."""
    free, n = looping(engine)
    prompt, places = free.prompt, accepted(free)
    token = free.sequence[len(prompt) + n]
    return {
        "free": free,
        "first": n,
        "stops": one(engine, "stops", prompt, max_tokens=60, stop_token_ids=[token]),
        "lengths": {k + 1: one(engine, f"length{k}", prompt, max_tokens=k + 1) for k in (places[0], places[-1])},
    }


def guided(engine: Capturing) -> dict[str, Ran]:
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex="(ab){6}c{20}")
    return engine.run(
        [
            Ask("regex", [97, 98] * 10, params={"max_tokens": 40, "structured_outputs": grammar}),
            Ask("logprobs", AGAIN_AND_AGAIN, params={"max_tokens": 20, "logprobs": 3}),
        ]
    )


def ignoring(engine: Capturing) -> dict[str, Ran]:
    """Run as if nobody had read the accepted counts."""
    from undercurrent.adapters.vllm.compat import RunnerV1

    original = RunnerV1._rows_kept
    RunnerV1._rows_kept = lambda self, batch: None  # type: ignore[method-assign]
    try:
        return engine.run(repetitive("control"))
    finally:
        RunnerV1._rows_kept = original  # type: ignore[method-assign]


def everything(model: str) -> dict[str, Any]:
    with Capturing(model, (*POINTS, LAST), speculative_config=NGRAM, num_gpu_blocks_override=13) as engine:
        drafts = Drafts(engine.worker.model_runner)
        runs = engine.run(repetitive("r"))
        counts = {"accepted": drafts.accepted, "rejected": drafts.rejected}
        seen = watch(engine)
        crowd = engine.run([Ask(f"crowd{i}", [i, i + 1, i + 2] * 30, params={"max_tokens": 90}) for i in range(5)])
        return {
            "runs": runs,
            "drafts": counts,
            "crowd": crowd,
            "seen": seen,
            "stops": stops(engine),
            "guided": guided(engine),
            "faults": [fault.detail for fault in engine.log.faults],
            "control": ignoring(engine),
        }


if __name__ == "__main__":
    main({"ngram": everything})
