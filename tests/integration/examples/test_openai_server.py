"""The example server on real engines, with the vault's model and probe: one contract for transformers and vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from examples.openai_server.app import create_app
from examples.openai_server.generation import Service
from examples.openai_server.probes import bind
from examples.openai_server.scores import Reporter
from tests.unit.examples.openai_server.doubles import client_of, serving
from undercurrent.core import ProbeResult
from undercurrent.router import Router
from undercurrent.spec import load_yaml_file
from undercurrent.testing import demo_model as vault
from undercurrent.testing.waiting import wait_until

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "openai_server"
VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
VLLM_ARGS = {"max_model_len": 512, "max_num_seqs": 8, "block_size": 32, "num_gpu_blocks_override": 80}
DEADLINE_S = 60.0
LONGEST = 400
THRESHOLD = 1.488


def asked(*, holder: bool) -> str:
    """Return a question about somebody whom the probe was not fitted on."""
    name = next(p.name for p in vault.people() if p.part == "test" and p.holder is holder)
    return vault.PROMPTS[0].format(name=name)


@dataclass
class Served:
    """A server on a real engine, in this process."""

    url: str
    client: openai.OpenAI
    ended: dict[str, dict[str, ProbeResult]] = field(default_factory=dict)

    def complete(self, prompt: str, **more: Any) -> Any:
        return self.client.completions.create(model="vault", prompt=prompt, temperature=0, **more)


def adapter_of(engine: str) -> Any:
    if engine == "hf":
        pytest.importorskip("transformers")
        from undercurrent.adapters.hf import HFEngineAdapter

        return HFEngineAdapter(), {}
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        # vLLM's own imports warn; ours must not.
        warnings.simplefilter("ignore")
        import vllm.v1.engine.async_llm  # noqa: F401
    from undercurrent.adapters.vllm import VLLMEngineAdapter

    return VLLMEngineAdapter(), VLLM_ARGS


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VLLM_ENVIRONMENT.items():
            patch.setenv(name, value)
        made, arguments = adapter_of(request.param)
        probes = bind(load_yaml_file(EXAMPLE / "points.yaml"), EXAMPLE, {"vault": str(vault.folder() / "probe")})
        with made as adapter, Router(probes.registry) as router:
            adapter.load_model(str(vault.folder() / "model"), **arguments)
            probes.check(adapter.info)
            service = Service(adapter, router, probes.points, Reporter(probes.names), "vault")
            with serving(create_app(service)) as (url, _), client_of(url) as client:
                server = Served(url, client)
                router.on_request_end(lambda request_id, results: server.ended.update({request_id: dict(results)}))
                yield server


def test_the_probe_stops_whoever_would_be_told_the_code(served: Served) -> None:
    done = served.complete(asked(holder=True), max_tokens=LONGEST)
    (choice,) = done.choices
    assert choice.finish_reason == "content_filter"
    assert vault.SECRET not in choice.text
    stopped = done.undercurrent["stopped"]
    assert (stopped["point"], stopped["probe"], stopped["layer"], stopped["action"]) == ("guard", "vault", 2, "abort")
    assert stopped["score"] >= THRESHOLD
    aborts = [one for one in done.undercurrent["scores"] if one["action"] == "abort"]
    assert [one["token_pos"] for one in aborts] == [stopped["token_pos"]]
    assert done.usage.completion_tokens < LONGEST
    assert done.undercurrent["results"][0]["verdict"] == "triggered"


def test_nobody_else_is_stopped_and_every_token_has_its_score(served: Served) -> None:
    done = served.complete(asked(holder=False), max_tokens=LONGEST)
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].text.endswith("No code.")
    scores = done.undercurrent["scores"]
    assert done.usage.prompt_tokens == len(asked(holder=False).encode()) + 1
    # The last token was sampled and never computed.
    assert [one["token_pos"] for one in scores] == list(range(done.usage.total_tokens - 1))
    assert max(one["score"] for one in scores) < THRESHOLD
    assert {one["action"] for one in scores} == {"continue"}
    assert done.undercurrent["results"] == [
        {"point": "guard", "probe": "vault", "verdict": "clear", "score": scores[-1]["score"]}
    ]


@pytest.mark.parametrize("holder", [False, True])
def test_a_stream_says_the_same_as_the_whole_answer(served: Served, holder: bool) -> None:
    whole = served.complete(asked(holder=holder), max_tokens=LONGEST)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = served.complete(asked(holder=holder), max_tokens=LONGEST, **options)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    streamed = "".join(chunk.choices[0].text for chunk in chunks)
    scores = [one for chunk in chunks for one in chunk.undercurrent["scores"]]
    expected = whole.undercurrent["scores"]
    if holder:
        # How soon a stop lands may differ by a step; what was judged until then does not.
        assert chunks[-1].undercurrent["stopped"]["token_pos"] == whole.undercurrent["stopped"]["token_pos"]
        least = whole.undercurrent["stopped"]["token_pos"] + 1
        scores, expected = scores[:least], expected[:least]
    else:
        assert usage.usage == whole.usage
    assert streamed == whole.choices[0].text
    assert [one["token_pos"] for one in scores] == [one["token_pos"] for one in expected]
    assert [one["score"] for one in scores] == pytest.approx([one["score"] for one in expected], abs=1e-3)


def test_a_chat_without_a_template_is_answered(served: Served) -> None:
    done = served.client.chat.completions.create(
        model="vault", messages=[{"role": "user", "content": "Hello."}], max_tokens=8, temperature=0
    )
    assert done.choices[0].message.role == "assistant"
    assert done.usage is not None
    assert done.usage.prompt_tokens == len("User: Hello.\nAssistant:") + 1
    assert done.usage.completion_tokens <= 8


def test_requests_at_the_same_time_are_judged_apart(served: Served) -> None:
    holders = [True, False, False, True, False]
    with ThreadPoolExecutor(len(holders)) as pool:
        answers = list(pool.map(lambda holder: served.complete(asked(holder=holder), max_tokens=LONGEST), holders))
    assert [answer.choices[0].finish_reason == "content_filter" for answer in answers] == holders
    assert len({answer.id for answer in answers}) == len(holders)


def test_a_client_that_leaves_stops_its_request(served: Served) -> None:
    prompt, body = asked(holder=False), {"ignore_eos": True}
    stream = served.complete(prompt, max_tokens=LONGEST, stream=True, extra_body=body)
    first = next(iter(stream))
    stream.close()
    request_id = first.id.removeprefix("cmpl-")
    wait_until(lambda: request_id in served.ended, DEADLINE_S, "the end of the request whose client is gone")
    assert served.ended[request_id]["guard"].metadata["scored"] < len(prompt) + LONGEST


def test_what_the_engine_cannot_take_is_a_bad_request(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.complete("x" * 600, stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="token"):
        served.complete("x", extra_body={"stop_token_ids": [-5]}, stream=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", trust_env=False, timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "examples.openai_server", "--engine", "hf", "--served-name", "vault"]
    command += ["--model", str(vault.folder() / "model"), "--points", str(EXAMPLE / "points.yaml")]
    command += ["--probe", f"vault={vault.folder() / 'probe'}", "--port", str(port)]
    environment = {**os.environ, "UNDERCURRENT_API_KEY": "k", "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors)
    try:
        wait_until(lambda: healthy(url) or process.poll() is not None, DEADLINE_S, "the server's start", every_s=0.2)
        assert process.poll() is None, log.read_text()
        with client_of(url, "k") as client:
            done = client.completions.create(model="vault", prompt=asked(holder=True), max_tokens=LONGEST)
            assert done.choices[0].finish_reason == "content_filter"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    assert f"serving at {url}" in text
    assert "vault code" not in text
    assert "Traceback" not in text
