"""Starting, refusing to start, dying and closing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from harness import POINTS, Harness, point

from undercurrent.adapters.vllm.priority import NICE_ON_CPU
from undercurrent.errors import CaptureError, ConfigError, EngineDeadError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.alone]


def children():
    # One per process, for good, whichever test needs it first.
    resource_tracker.ensure_running()
    return {p.pid for p in psutil.Process().children(recursive=True)}


def wait_until(done, deadline_s=30):
    end = time.monotonic() + deadline_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("engine_args", "match"),
    [
        ({"enforce_eager": False, "compilation_config": {"mode": 1}}, "STOCK_TORCH_COMPILE"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, r"parallel TP\+PP: no test runs it"),
        ({"pipeline_parallel_size": 2}, "2 pipeline ranks need 2 rings, and there are 1"),
        (
            {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            "speculative decoding by another method than ngram",
        ),
        ({"runner": "pooling"}, "pooling models"),
        ({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_capture_does_not_support_is_refused_by_name_before_anything_starts(models, engine_args, match):
    before = children()
    harness = Harness(models["llama"], **engine_args)
    try:
        with pytest.raises(CaptureError, match=match):
            harness.start()
        assert children() == before
    finally:
        harness.close()


def test_what_a_cpu_never_configures_is_refused_by_name_too(models):
    """vLLM itself turns these off here, so the decision is asked for directly."""
    from vllm.config import CUDAGraphMode

    from undercurrent.adapters.vllm import compat

    harness = Harness(models["llama"])
    try:
        config = harness.engine._config()
        compat.check_supported(config, v2_runner=False)
        compat.check_supported(config, v2_runner=True)
        config.scheduler_config.async_scheduling = True
        compat.check_supported(config, v2_runner=False)
        config.speculative_config = SimpleNamespace(method="ngram")
        with pytest.raises(CaptureError, match="on the V2 model runner"):
            compat.check_supported(config, v2_runner=True)
        with pytest.raises(CaptureError, match="by another method than ngram"):
            compat.check_supported(config, v2_runner=False)
        config.speculative_config = None
        config.parallel_config.enable_dbo = True
        with pytest.raises(CaptureError, match="micro-batching"):
            compat.check_supported(config, v2_runner=True, allow_untested=True)
        config.parallel_config.enable_dbo = False
        for mode, v2_runner, reason in (
            (CUDAGraphMode.FULL_AND_PIECEWISE, False, "CUDA graphs of whole steps"),
            (CUDAGraphMode.FULL_DECODE_ONLY, True, "CUDA graphs of whole steps"),
            (CUDAGraphMode.PIECEWISE, True, "CUDA graphs on the V2 model runner"),
        ):
            config.compilation_config.cudagraph_mode = mode
            with pytest.raises(CaptureError, match=reason):
                compat.check_supported(config, v2_runner=v2_runner, allow_untested=True)
        compat.check_supported(config, v2_runner=False, allow_untested=True)
    finally:
        harness.close()


def test_arguments_that_vllm_refuses_are_a_configuration_error(models):
    harness = Harness(models["llama"], max_num_seqs=64, max_num_batched_tokens=8, enable_chunked_prefill=True)
    try:
        with pytest.raises(ConfigError, match="vLLM refuses"):
            harness.start()
    finally:
        harness.close()


@pytest.mark.parametrize(
    ("bad_point", "match"),
    [
        (point("deep", "mlp_out", (4,)), "point 'deep': the model has layers 0 to 3"),
        (point("experts", "router_topk", (0,)), "point 'experts': tensor_type router_topk"),
    ],
    ids=["layer", "experts"],
)
def test_a_point_that_the_model_cannot_serve_is_refused_by_name(models, bad_point, match):
    harness = Harness(models["llama"], points=(bad_point,))
    try:
        with pytest.raises(CaptureError, match=match):
            harness.start()
    finally:
        harness.close()


def test_an_unknown_engine_argument_is_refused(models):
    harness = Harness(models["llama"], no_such_argument=1)
    try:
        with pytest.raises(ConfigError, match="no_such_argument"):
            harness.start()
    finally:
        harness.close()


def test_the_plugin_may_be_registered_twice():
    from vllm.v1.worker.gpu_worker import Worker

    from undercurrent.adapters.vllm.plugin import register

    register()
    first = Worker.load_model
    register()
    assert Worker.load_model is first


# vLLM's constructor leaves a messaging context behind when it fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_refusal_in_the_worker_reaches_the_driver_by_name(models):
    """The taps of this engine do not fit: found by the worker, in another process, and told through the ring."""
    before = children()
    harness = Harness(models["llama"], max_num_seqs=8, max_num_batched_tokens=48)
    harness.engine._options["max_tap_bytes"] = 1000
    try:
        with pytest.raises(CaptureError, match="max_tap_bytes = 1000"):
            harness.start()
        gc.collect()
        wait_until(lambda: children() <= before)
    finally:
        harness.close()


def test_a_killed_engine_core_is_reported_and_closing_leaves_nothing(models):
    before = children()
    harness = Harness(models["llama"], points=POINTS[:1], max_num_seqs=8, max_num_batched_tokens=48)
    try:
        harness.start()
        folder = Path(harness.engine._folder.name)
        assert (folder / "capture.json").stat().st_mode & 0o077 == 0
        writer = harness.ring.stats().writer_pid
        core = psutil.Process(writer).ppid()
        assert {os.getpgid(core), os.getpgid(writer)} == {core}
        # On a CPU the engine leaves the first turn to whoever reads, publishes and aborts.
        assert psutil.Process(writer).nice() == max(NICE_ON_CPU, psutil.Process().nice())
        assert psutil.Process(writer).nice() > psutil.Process().nice()
        request = harness.request("doomed", list(range(20)), points=("residual",), max_tokens=200)

        async def run():
            async for delta in harness.engine.submit(request):
                if delta.token_ids:
                    os.kill(writer, signal.SIGKILL)

        with pytest.raises(EngineDeadError):
            harness.call(run())
        with pytest.raises(EngineDeadError):
            harness.call(harness.engine.check(request))

        async def again():
            async for _ in harness.engine.submit(request):
                pass

        with pytest.raises(EngineDeadError):
            harness.call(again())
        harness.call(asyncio.wait_for(harness.engine.abort("doomed:1"), 10))
    finally:
        harness.close()
    wait_until(lambda: children() <= before)
    assert not folder.exists()


@pytest.fixture
def owner(models):
    """A process that drives an engine, leads a group as a shell's job does, and whose request is running."""
    command = [sys.executable, str(Path(__file__).parent / "signalled_owner.py"), str(models["llama"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        below = []
        try:
            assert any(line == "owner: running\n" for line in process.stdout)
            below = psutil.Process(process.pid).children(recursive=True)
            yield process, below
        finally:
            for started in [process, *below]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    started.kill()


def test_a_signal_to_the_owners_group_lets_its_requests_end_and_closing_is_prompt(owner):
    """As Ctrl-C in a terminal: the engine must not stop before its owner has told it to."""
    process, below = owner
    for number in (signal.SIGINT, signal.SIGTERM):
        os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=120)
    (said,) = re.findall(r"^owner: (.*), closed in ([0-9.]+) s$", out, re.MULTILINE)
    assert (process.returncode, said[0]) == (0, "length after 200 tokens, 2 signals")
    assert "force killing" not in out
    assert float(said[1]) < 8
    assert psutil.wait_procs(below, timeout=30)[1] == []


def test_an_engine_without_points_ends_with_its_owner_too(owner):
    process, below = owner
    assert len(below) >= 2
    os.killpg(process.pid, signal.SIGKILL)
    assert psutil.wait_procs(below, timeout=30)[1] == []
