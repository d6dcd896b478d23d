"""A bare vLLM server with two API servers: it captures, publishes, and stops what a probe wants stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))

from serve_bench import HERE, LAYER, ServeBench, complete

from undercurrent.codec import as_array, positions
from undercurrent.protocol.messages import EndReason
from undercurrent.testing.tiny_models import build_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def bench(apache_broker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    model = build_tiny_model("llama", folder / "model", max_len=4096)
    with ServeBench(apache_broker.settings(), folder, model) as made:
        yield made


@pytest.fixture(scope="module")
def server(bench):
    capture = bench.capture_file(static=["residual"])
    started = bench.serve(
        [str(HERE / "vllm_serve.py")], capture, "--api-server-count", "2",
        "--worker-extension-cls", "foreign_extension.ForeignExtension",
    )  # fmt: skip
    bench.start_host()
    return started.wait_ready()


def rows_of(messages):
    """Return positions and rows of a stream that has no gap."""
    started, *blocks, ended = messages
    assert [m.seq for m in messages] == list(range(len(messages)))
    assert (started.layers, ended.dropped) == ((LAYER,), (0,))
    return np.concatenate([positions(b) for b in blocks]), np.concatenate([as_array(b) for b in blocks])


def test_every_request_is_captured_without_a_word_of_its_client(bench, server):
    answer = complete(server, "Every row of this leaves the engine.", max_tokens=12)
    messages = bench.stream(answer.id)
    where, rows = rows_of(messages)
    assert (messages[0].engine, messages[0].model, messages[0].attempt) == ("chat-0.dp0", "tiny", 1)
    assert messages[0].prompt_len == answer.usage.prompt_tokens
    assert messages[-1].reason is EndReason.FINISHED
    # The last token generated is never computed.
    assert where.tolist() == list(range(answer.usage.prompt_tokens + answer.usage.completion_tokens - 1))
    assert np.isfinite(rows).all()
