"""What is refused, and that it is said in OpenAI's form, with the parameter's name and the right status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from examples.openai_server.schema import IGNORED, NEUTRAL
from tests.unit.examples.openai_server.doubles import MODEL, Running, ScriptedAdapter, client_of, running

TEXT = {"model": MODEL, "prompt": "x"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(max_body_bytes=2000) as started:
        yield started


def post(server: Running, path: str, **request: Any) -> httpx.Response:
    return httpx.post(f"{server.base_url}{path}", trust_env=False, **request)


def error_of(got: httpx.Response, status: int) -> dict[str, Any]:
    assert got.status_code == status, got.text
    assert got.headers["x-request-id"]
    body = got.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


UNSUPPORTED = [
    ("n", 2),
    ("best_of", 3),
    ("echo", True),
    ("suffix", "end"),
    ("logprobs", 0),
    ("logprobs", True),
    ("logit_bias", {"1": 2}),
    ("tools", [{"type": "function"}]),
    ("response_format", {"type": "json_object"}),
    ("top_logprobs", 2),
    ("reasoning_effort", "low"),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_what_is_not_supported_is_refused_by_name(
    server: Running, path: str, body: dict[str, Any], name: str, value: object
) -> None:
    error = error_of(post(server, path, json={**body, name: value}), 400)
    assert (error["param"], error["code"], error["type"]) == (name, "unsupported_parameter", "invalid_request_error")
    assert name in error["message"]


def test_what_asks_for_nothing_is_taken(server: Running) -> None:
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    ignored = {name: "anything" for name in IGNORED}
    assert post(server, "/v1/completions", json={**TEXT, **neutral, **ignored}).status_code == 200
    assert post(server, "/v1/chat/completions", json={**CHAT, **dict.fromkeys(NEUTRAL)}).status_code == 200


def test_the_official_client_shows_status_parameter_and_code(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.completions.create(**TEXT, n=2)
    assert (caught.value.param, caught.value.code) == ("n", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError) as missing:
        server.client.completions.create(model="gpt-nothing", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"model": 3}, "model"),
        ({"stop": "\ud800"}, "stop[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"stream_options": {"include_usage": True}}, None),
    ],
)
def test_a_wrong_value_is_named(server: Running, change: dict[str, Any], param: str | None) -> None:
    # By hand: JSON has no NaN, and clients send it all the same.
    content = json.dumps({**TEXT, **change}).encode()
    error = error_of(
        post(server, "/v1/completions", content=content, headers={"Content-Type": "application/json"}), 400
    )
    assert error["param"] == param
    if param is not None:
        assert param in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        (["x"], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "messages[0].tool_calls"),
    ],
)
def test_a_wrong_message_is_named(server: Running, messages: object, param: str) -> None:
    error = error_of(post(server, "/v1/chat/completions", json={"model": MODEL, "messages": messages}), 400)
    assert error["param"] == param


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 1500, b'{"model": 1'])
def test_a_body_that_is_no_object_is_refused(server: Running, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    error = error_of(post(server, "/v1/completions", content=content, headers=headers), 400)
    assert error["type"] == "invalid_request_error"


def test_a_missing_parameter_is_named(server: Running) -> None:
    error = error_of(post(server, "/v1/completions", json={"model": MODEL}), 400)
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


def test_more_than_the_context_holds_is_refused_with_the_code_that_clients_know(server: Running) -> None:
    too_long = [{"prompt": "x" * 200}, {"prompt": "x" * 190, "max_tokens": 11}]
    for body in too_long:
        error = error_of(post(server, "/v1/completions", json={**TEXT, **body}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "200" in error["message"]
    assert post(server, "/v1/completions", json={**TEXT, "prompt": "x" * 190, "max_tokens": 10}).status_code == 200


@pytest.mark.parametrize("change", [{"\ud800": 1}, {"model": "\ud800"}])
def test_halves_of_characters_in_names_are_refused_in_words_that_a_response_can_hold(
    server: Running, change: dict[str, Any]
) -> None:
    content = json.dumps({**TEXT, **change}).encode()
    got = post(server, "/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert error_of(got, 404 if "model" in change else 400)


def test_what_the_engine_refuses_has_a_status_also_where_a_stream_was_asked_for(server: Running) -> None:
    for stream in (False, True):
        error = error_of(post(server, "/v1/completions", json={**TEXT, "prompt": "", "stream": stream}), 400)
        assert error["message"] == "the prompt has no tokens"


def test_a_long_body_is_refused_whether_its_length_is_said_or_not(server: Running) -> None:
    headers = {"Content-Type": "application/json"}
    long = b'{"prompt": "' + b"x" * 3000
    assert error_of(post(server, "/v1/completions", content=long, headers=headers), 413)["code"] == "request_too_large"
    pieces = (long[start : start + 500] for start in range(0, len(long), 500))
    assert (
        error_of(post(server, "/v1/completions", content=pieces, headers=headers), 413)["code"] == "request_too_large"
    )


def test_unknown_places_and_methods_are_errors_in_the_same_form(server: Running) -> None:
    assert "/v1/embeddings" in error_of(post(server, "/v1/embeddings", json={}), 404)["message"]
    assert error_of(httpx.get(f"{server.base_url}/v1/completions", trust_env=False), 405)


def test_a_key_is_asked_for_where_one_is_set() -> None:
    with running(api_key="s3cret-ü") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            error = error_of(post(server, "/v1/completions", json=TEXT, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
        assert error_of(httpx.get(f"{server.base_url}/v1/models", trust_env=False), 401)
        assert httpx.get(f"{server.base_url}/healthz", trust_env=False).status_code == 200
    with running(api_key="s3cret") as server:
        with pytest.raises(openai.AuthenticationError):
            server.client.models.list()
        with client_of(server.base_url, "s3cret") as client:
            assert client.completions.create(**TEXT).choices[0].text == "Hello, world."


def test_health_says_what_is_served(server: Running) -> None:
    got = httpx.get(f"{server.base_url}/healthz", trust_env=False)
    assert (got.status_code, got.json()) == (200, {"status": "ok", "model": MODEL})


def test_a_refused_request_leaves_nothing_behind() -> None:
    adapter = ScriptedAdapter()
    with running(adapter) as server:
        error_of(post(server, "/v1/completions", json={**TEXT, "prompt": ""}), 400)
    assert adapter.registered == {}
