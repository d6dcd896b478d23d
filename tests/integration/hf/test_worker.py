"""The engine worker with transformers, as a process, on a real broker: text, activations, and no vLLM anywhere."""

from __future__ import annotations

import numpy as np
import pytest

from undercurrent.adapters.hf.oracle import HFOracle
from undercurrent.codec.tensors import as_array, positions, token_ids
from undercurrent.protocol.messages import ActivationBlock, Outcome, StreamEnded, StreamStarted
from undercurrent.testing.engine_bench import EngineBench

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]


@pytest.fixture
def without_vllm(tmp_path):
    """An environment in which nobody can import vLLM."""
    package = tmp_path / "poison" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('vLLM was imported')\n", encoding="utf-8")
    return {"PYTHONPATH": str(package.parent), "HF_HUB_OFFLINE": "1"}


def test_a_file_written_for_vllm_runs_with_transformers(apache_broker, tmp_path, llama, without_vllm):
    """`--engine hf` on a configuration for vLLM; what only vLLM knows is ignored, and the log says so."""
    args = {"dtype": "float32", "max_model_len": 200, "max_num_seqs": 3, "enable_chunked_prefill": False}
    engine = {"kind": "vllm", "model": str(llama), "args": args}
    with EngineBench(apache_broker.settings(), tmp_path) as bench:
        worker = bench.start_worker(bench.configure(engine=engine), without_vllm, ["--engine", "hf"])
        worker.wait_ready()
        prompts = [f"prompt number {number}" for number in range(5)]
        ids = bench.send(prompts, max_tokens=12, temperature=0.0, ignore_eos=True)
        (long,) = bench.send(["one to be stopped"], max_tokens=180, ignore_eos=True)
        bench.wait(lambda: long in bench.between_tokens(), "first tokens")
        command = bench.abort(long)
        finals = bench.wait_finals([*ids, long])
        assert finals[long][0].outcome is Outcome.ABORTED
        assert finals[long][0].abort.command_id == command
        oracle, streams = HFOracle(llama), bench.activations()
        for request_id, prompt in zip(ids, prompts, strict=True):
            (final,) = finals[request_id]
            assert (final.outcome, final.generated_tokens, final.prompt_tokens) == (
                Outcome.COMPLETED,
                12,
                len(prompt),
            )
            check_stream(streams[request_id, final.attempt], len(prompt) + 11, oracle)
        assert worker.terminate() == 0, worker.tail()
        log = worker.log.read_text()
        assert "enable_chunked_prefill" in log
        assert "vLLM was imported" not in log


def check_stream(messages, rows, oracle):
    assert isinstance(messages[0], StreamStarted)
    assert isinstance(messages[-1], StreamEnded)
    blocks = [message for message in messages if isinstance(message, ActivationBlock)]
    assert [position for block in blocks for position in positions(block)] == list(range(rows))
    sequence = [int(token) for block in blocks for token in token_ids(block)]
    truth = oracle.activations(sequence)["residual_stream"][:, [0, 2]]
    found = np.concatenate([as_array(block) for block in blocks])
    errors = np.linalg.norm(found - truth, axis=-1) / np.linalg.norm(truth, axis=-1)
    assert errors.max() <= 1e-5


def test_what_only_vllm_can_do_stops_the_start_by_name(apache_broker, tmp_path, llama, without_vllm):
    engine = {"kind": "hf", "model": str(llama), "args": {"tensor_parallel_size": 2}}
    with EngineBench(apache_broker.settings(), tmp_path) as bench:
        worker = bench.start_worker(bench.configure(engine=engine), without_vllm)
        assert worker.wait(60) != 0
        assert "tensor_parallel_size" in worker.tail()
