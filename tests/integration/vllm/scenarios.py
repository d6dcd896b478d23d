"""Loads that engines run in tests of schedules and runners, also in an interpreter of their own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from _pytest.monkeypatch import MonkeyPatch
from inprocess import Ask, Capturing

HERE = Path(__file__).parent
DEADLINE_S = 360


def found_by(script: str, model: Path, folder: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a script of this folder in a new interpreter and return what its scenarios found, by name.

    Args:
        script: name of the file.
        model: that its engines load.
        folder: for the result.
        environment: further variables; `PYTHONPATH` comes before the one that is set.
    """
    out = folder / "found.pickle"
    given = dict(environment or {})
    paths = [given.pop("PYTHONPATH", ""), str(HERE), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / script), str(model), str(out)],
        env={**os.environ, **given, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return pickle.loads(out.read_bytes())  # noqa: S301 - written a moment ago, by the script above


def main(scenarios: Mapping[str, Callable[[str], Any]]) -> None:
    """Run the scenarios and pickle what each returns: `python SCRIPT MODEL OUT`."""
    model, out = sys.argv[1:]
    Path(out).write_bytes(pickle.dumps({name: scenario(model) for name, scenario in scenarios.items()}))


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, length).tolist() for length in lengths]


class Ahead(Capturing):
    """An engine with asynchronous scheduling. vLLM's CPU platform turns it off, and here it is turned on again.

    The scheduler and both model runners then do what they do on a GPU; what V1 hands back is made without its streams.
    """

    def _start(self) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.worker import gpu_model_runner

        create = EngineArgs.create_engine_config

        def ahead(args: EngineArgs, *others: Any, **kwargs: Any) -> Any:
            config = create(args, *others, **kwargs)
            config.scheduler_config.async_scheduling = True
            return config

        outputs = gpu_model_runner.AsyncGPUModelRunnerOutput
        with MonkeyPatch.context() as patch:
            patch.setattr(EngineArgs, "create_engine_config", ahead)
            engine = super()._start()
        self.patch = MonkeyPatch()
        self.patch.setattr(gpu_model_runner, "AsyncGPUModelRunnerOutput", _on_the_host(outputs))
        return engine

    def close(self) -> None:
        super().close()
        self.patch.undo()


def _on_the_host(outputs: Any) -> Any:
    """Return vLLM's class of a step's outputs with a start that copies nothing from a device."""

    class HostOutput(outputs):  # type: ignore[misc, valid-type]
        def __init__(
            self,
            *,
            model_runner_output: Any,
            sampled_token_ids: Any,
            logprobs_tensors: Any,
            invalid_req_indices: list[int],
            vocab_size: int,
            **_: Any,
        ) -> None:
            self._model_runner_output = model_runner_output
            self._invalid_req_indices = invalid_req_indices
            self.async_copy_ready_event = SimpleNamespace(synchronize=lambda: None)
            # Copies: the next step is under way before these are read.
            self._sampled_token_ids = self.sampled_token_ids_cpu = sampled_token_ids.clone()
            self.vocab_size = vocab_size
            self._logprobs_tensors = self._logprobs_tensors_cpu = logprobs_tensors
            self._num_nans = self._num_nans_cpu = self._has_fault = None

    return HostOutput


STOP = list(range(64, 128))


def mixed() -> list[Ask]:
    """Chunked prefills beside decodes, requests that come while others run, one that is not captured."""
    lengths, counts, after = (3, 60, 17, 90, 33), (12, 5, 9, 4, 7), (0, 0, 1, 3, 6)
    asks = [
        Ask(f"r{i}", prompt, after=a, params={"max_tokens": n})
        for i, (prompt, n, a) in enumerate(zip(prompts(1, *lengths), counts, after, strict=True))
    ]
    return [*asks, Ask("silent", prompts(2, 21)[0], points=(), after=2)]


def crowded(tokens: int = 50) -> list[Ask]:
    """More tokens than a cache of few blocks holds: requests are preempted and computed again."""
    return [Ask(f"r{i}", prompt, params={"max_tokens": tokens}) for i, prompt in enumerate(prompts(3, 30, 40, 50, 60))]


def stopped() -> list[Ask]:
    """Every way to end."""
    a, b, c, d, e = prompts(4, 9, 14, 40, 11, 100)
    return [
        Ask("stop-token", a, params={"max_tokens": 120, "stop_token_ids": STOP}),
        Ask("stop-token-too", b, params={"max_tokens": 120, "stop_token_ids": STOP}),
        Ask("aborted", c, params={"max_tokens": 60}, abort_after=9),
        Ask("one", d, params={"max_tokens": 1}),
        Ask("aborted-in-prefill", e, abort_after=3),
    ]


def watch(engine: Capturing) -> dict[str, Any]:
    """Count what the scheduler did, from now on."""
    seen = {"preempted": 0, "again": 0, "longer": 0}
    runner = engine.worker.model_runner
    original = runner.execute_model
    known: set[str] = set()

    def execute_model(output: Any, *args: Any, **kwargs: Any) -> Any:
        seen["preempted"] += len(output.preempted_req_ids or ())
        for request in output.scheduled_new_reqs:
            seen["again"] += request.req_id in known
            seen["longer"] += len(request.prefill_token_ids or ()) > len(request.prompt_token_ids)
            known.add(request.req_id)
        return original(output, *args, **kwargs)

    runner.execute_model = execute_model
    return seen


Asks = list[Ask] | Callable[[Capturing], list[Ask]]
"""Requests, or what makes them, which may ask the engine first."""


def run(model: str, asks: Asks, kind: type[Capturing] = Capturing, **engine_args: Any) -> dict[str, Any]:
    """Run requests on an engine of their own; return them and what else is to be known."""
    with kind(model, **engine_args) as engine:
        seen = watch(engine)
        runs = engine.run(asks(engine) if callable(asks) else asks)
        runner = type(engine.worker.model_runner)
        return {
            "runs": runs,
            "seen": seen,
            "faults": [fault.detail for fault in engine.log.faults],
            "errors": engine.ring.stats().capture_errors,
            "runner": f"{runner.__module__}.{runner.__name__}",
        }
