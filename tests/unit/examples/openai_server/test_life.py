"""Clients that go away, engines that fail, and a server that is asked to stop."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.unit.examples.openai_server.doubles import (
    DEADLINE_S,
    MODEL,
    ScriptedAdapter,
    point,
    running,
)
from undercurrent.errors import CaptureError, EngineDeadError
from undercurrent.testing.waiting import wait_until

TEXT = {"model": MODEL, "prompt": "x"}


def stopped(adapter: ScriptedAdapter) -> None:
    """See that the engine was told to stop the one request it had."""
    wait_until(lambda: adapter.stopped, DEADLINE_S, "the stop of a request whose client is gone")
    assert adapter.stopped == [adapter.calls[0].request_id]
    wait_until(lambda: not adapter.registered, DEADLINE_S, "the end of its registration")


def test_a_client_that_leaves_a_stream_stops_the_request_in_the_engine() -> None:
    adapter = ScriptedAdapter(pause_at=3)
    with running(adapter, [point("guard", "watch")]) as server:
        stream = server.client.completions.create(**TEXT, stream=True)
        assert next(iter(stream)).choices[0].text == "H"
        assert adapter.paused.wait(DEADLINE_S)
        stream.close()
        stopped(adapter)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_before_the_first_token_stops_it_too(streams: bool) -> None:
    adapter = ScriptedAdapter(pause_at=0)
    with running(adapter) as server, httpx.Client(trust_env=False) as client:
        with ThreadPoolExecutor(1) as pool:
            # The deadline is the client's way to leave; it cannot come before the engine has the request.
            asked = pool.submit(
                client.post, f"{server.base_url}/v1/completions", json={**TEXT, "stream": streams}, timeout=2.0
            )
            assert adapter.paused.wait(DEADLINE_S)
            assert isinstance(asked.exception(DEADLINE_S), httpx.ReadTimeout)
        stopped(adapter)
        # The server lives on.
        adapter.pause_at = None
        assert server.client.completions.create(**TEXT).choices[0].text == "Hello, world."


def test_an_engine_that_fails_before_the_first_token_is_a_500_that_tells_nothing_of_ours() -> None:
    with running(ScriptedAdapter(error=(0, CaptureError("rows were lost of /srv/model")))) as server:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                server.client.completions.create(**TEXT, stream=stream)
            assert caught.value.status_code == 500
            assert "/srv" not in str(caught.value)
        assert httpx.get(f"{server.base_url}/healthz", trust_env=False).status_code == 200


def test_a_probe_that_does_not_start_refuses_its_request_since_nothing_would_guard_it() -> None:
    adapter = ScriptedAdapter()
    with running(adapter, [point("guard", "unready")]) as server:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                server.client.completions.create(**TEXT, stream=stream)
            assert caught.value.code == "generation_failed"
    assert adapter.registered == {}


def test_an_engine_that_fails_within_a_stream_ends_it_with_an_error() -> None:
    adapter = ScriptedAdapter(error=(3, CaptureError("rows were lost")))
    with running(adapter) as server:
        stream = server.client.completions.create(**TEXT, stream=True)
        texts = [next(stream).choices[0].text for _ in range(3)]
        with pytest.raises(openai.APIError) as caught:
            next(stream)
        assert texts == ["H", "e", "l"]
        assert caught.value.code == "generation_failed"
        assert adapter.registered == {}


def test_an_engine_that_gives_up_without_a_probes_word_is_an_error_and_no_answer() -> None:
    with running(ScriptedAdapter(ends_with="abort")) as server:
        with pytest.raises(openai.InternalServerError) as caught:
            server.client.completions.create(**TEXT)
        assert (caught.value.status_code, caught.value.code) == (500, "generation_failed")
        with pytest.raises(openai.APIError):
            list(server.client.completions.create(**TEXT, stream=True))
        assert httpx.get(f"{server.base_url}/healthz", trust_env=False).status_code == 200


def test_an_engine_that_died_is_a_503_and_the_server_is_not_healthy_any_more() -> None:
    with running(ScriptedAdapter(error=(1, EngineDeadError("vLLM's engine core died")))) as server:
        with pytest.raises(openai.InternalServerError) as caught:
            server.client.completions.create(**TEXT)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_unavailable")
        got = httpx.get(f"{server.base_url}/healthz", trust_env=False)
        assert (got.status_code, got.json()["status"]) == (503, "dead")


def test_an_engine_that_is_shut_down_is_a_503() -> None:
    with running() as server:
        server.adapter.dead = True
        with pytest.raises(openai.InternalServerError) as caught:
            server.client.completions.create(**TEXT)
        assert caught.value.status_code == 503


def test_a_fault_of_our_own_is_a_500_in_the_same_form() -> None:
    with running(ScriptedAdapter(error=(0, KeyError("secret detail")))) as server:
        got = httpx.post(f"{server.base_url}/v1/completions", json=TEXT, trust_env=False)
        assert got.status_code == 500
        assert got.headers["x-request-id"]
        assert got.json()["error"]["type"] == "server_error"
        assert "secret detail" not in got.text


def test_a_server_that_is_asked_to_stop_finishes_what_runs_then_lets_the_engine_go() -> None:
    adapter = ScriptedAdapter(pause_at=3)
    with running(adapter) as server:
        stream = server.client.completions.create(**TEXT, stream=True)
        assert adapter.paused.wait(DEADLINE_S)
        server.server.should_exit = True
        wait_until(lambda: refuses(server.base_url), DEADLINE_S, "the end of new connections")
        assert server.stops == []
        adapter.go_on.set()
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world."
        wait_until(lambda: server.stops, DEADLINE_S, "the stop of the engine")
    assert adapter.stopped == []
    assert server.stops == ["stopped"]


def refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/healthz", trust_env=False, timeout=1.0)
    except httpx.TransportError:
        return True
    return False


def test_nothing_that_a_client_wrote_or_read_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running(ScriptedAdapter(error=(5, CaptureError("rows were lost")))) as server:
        with pytest.raises(openai.InternalServerError):
            server.client.completions.create(model=MODEL, prompt="a very private prompt")
        ours = [record for record in caplog.records if not record.name.startswith(("openai", "http"))]
    request_id = server.adapter.calls[0].request_id
    assert [record.getMessage() for record in ours if record.levelno >= logging.ERROR] == [
        f"request {request_id}: rows were lost"
    ]
    assert not any("private" in record.getMessage() or "Hello" in record.getMessage() for record in ours)
