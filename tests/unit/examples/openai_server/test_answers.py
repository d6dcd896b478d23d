"""What the official client reads: texts, streams, usage, scores, and what a probe stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.unit.examples.openai_server.doubles import LAYER, MODEL, Running, ScriptedAdapter, point, running

PROMPT = "Say it:"
FIRST = len(PROMPT)
"""Position of the first generated token."""


@pytest.fixture
def plain() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture
def watched() -> Iterator[Running]:
    with running(points=[point("guard", "watch")]) as server:
        yield server


def condemned() -> ScriptedAdapter:
    return ScriptedAdapter(text="Fine. No! Never.")


def test_the_model_is_listed_and_can_be_asked_for(plain: Running) -> None:
    (listed,) = plain.client.models.list().data
    assert listed.id == MODEL
    assert listed.object == "model"
    assert plain.client.models.retrieve(MODEL) == listed


def test_a_completion_has_text_usage_and_an_end(plain: Running) -> None:
    done = plain.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5)
    assert done.object == "text_completion"
    assert done.model == MODEL
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason, choice.index) == ("Hello", "length", 0)
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (7, 5, 12)


def test_a_text_that_ends_by_itself_says_stop(plain: Running) -> None:
    done = plain.client.completions.create(model=MODEL, prompt=[PROMPT], max_tokens=100)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("Hello, world.", "stop")


def test_without_max_tokens_a_completion_has_16_and_a_chat_what_there_is_room_for(plain: Running) -> None:
    plain.client.completions.create(model=MODEL, prompt=PROMPT)
    plain.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    text, chat = plain.adapter.calls
    assert text.sampling["max_tokens"] == 16
    assert chat.sampling["max_tokens"] == 200 - len(chat.prompt)


def test_a_chat_is_written_out_and_answered(plain: Running) -> None:
    done = plain.client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]},
        ],
        max_completion_tokens=6,
    )
    assert plain.adapter.calls[0].prompt == "System: Be kind.\nUser: Who are you?\nAssistant:"
    assert plain.adapter.calls[0].sampling["stop"] == ["\nUser:"]
    assert done.object == "chat.completion"
    message = done.choices[0].message
    assert (message.role, message.content, message.refusal) == ("assistant", "Hello,", None)
    assert done.choices[0].finish_reason == "length"


def test_an_answer_can_be_sent_back_as_it_came(plain: Running) -> None:
    first = plain.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    turns = [{"role": "user", "content": "x"}, first.choices[0].message.model_dump(), {"role": "user", "content": "y"}]
    plain.client.chat.completions.create(model=MODEL, messages=turns)
    assert plain.adapter.calls[1].prompt == "User: x\nAssistant: Hello, world.\nUser: y\nAssistant:"


def test_sampling_parameters_reach_the_engine(plain: Running) -> None:
    plain.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0,
        top_p=0.5,
        seed=3,
        stop="x",
        presence_penalty=1,
        frequency_penalty=-1.5,
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [7], "ignore_eos": True},
    )
    assert plain.adapter.calls[0].sampling == {
        "temperature": 0,
        "top_p": 0.5,
        "seed": 3,
        "stop": ["x"],
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "max_tokens": 16,
    }


def test_defaults_are_openais_whatever_the_engines_are(plain: Running) -> None:
    plain.client.completions.create(model=MODEL, prompt=PROMPT, temperature=None, stop=None)
    assert plain.adapter.calls[0].sampling == {"temperature": 1.0, "top_p": 1.0, "stop": [], "max_tokens": 16}


def test_a_streamed_completion_brings_text_and_scores_token_by_token(watched: Running) -> None:
    chunks = list(watched.client.completions.create(model=MODEL, prompt=PROMPT, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world."
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 12 + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    scores = [one for chunk in chunks for one in chunk.undercurrent["scores"]]
    # The last token is sampled, not computed: nothing was captured of it.
    assert scores == [
        {"point": "guard", "layer": LAYER, "token_pos": FIRST + n, "score": ord(char), "action": "continue"}
        for n, char in enumerate("Hello, world")
    ]
    assert chunks[0].undercurrent == {"scores": []}
    assert chunks[-1].undercurrent["results"] == [
        {"point": "guard", "probe": "watch", "verdict": "done", "score": ord("w")}
    ]


def test_a_streamed_chat_names_its_role_once(watched: Running) -> None:
    messages = [{"role": "user", "content": "x"}]
    chunks = list(watched.client.chat.completions.create(model=MODEL, messages=messages, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * 12
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world."
    assert chunks[1].undercurrent["scores"][0]["score"] == ord("H")


def test_the_clients_own_accumulator_of_chat_streams_reads_it(watched: Running) -> None:
    messages = [{"role": "user", "content": "x"}]
    with watched.client.chat.completions.stream(model=MODEL, messages=messages) as stream:
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == "Hello, world."
    assert whole.choices[0].finish_reason == "stop"


def test_usage_ends_a_stream_that_asked_for_it(plain: Running) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "stream": True}
    chunks = list(plain.client.completions.create(**asked, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 13
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 7 + 13
    assert all(chunk.choices for chunk in plain.client.completions.create(**asked))


def test_a_stream_is_server_sent_events_to_the_byte(plain: Running) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 3}
    got = httpx.post(f"{plain.base_url}/v1/completions", json=body, trust_env=False)
    assert got.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = got.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events] == ["H", "e", "l"]
    assert "usage" not in json.loads(events[-1].removeprefix("data: "))


def test_every_chunk_has_the_key_of_usage_where_it_was_asked_for(plain: Running) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 3}
    body["stream_options"] = {"include_usage": True}
    got = httpx.post(f"{plain.base_url}/v1/completions", json=body, trust_env=False)
    *events, _, _ = got.text.split("\n\n")
    usages = [json.loads(event.removeprefix("data: "))["usage"] for event in events]
    assert usages == [None] * 3 + [{"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}]


def test_a_probe_that_stops_a_stream_ends_it_with_content_filter_and_the_detail() -> None:
    with running(condemned(), [point("guard", "watch")]) as server:
        chunks = list(server.client.completions.create(model=MODEL, prompt=PROMPT, stream=True))
    # `!` is condemned when it is computed, so its own text had gone out; what came after it is not shown.
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Fine. No!"
    last = chunks[-1]
    assert last.choices[0].finish_reason == "content_filter"
    at = FIRST + "Fine. No!".index("!")
    assert last.undercurrent["stopped"] == {
        "point": "guard",
        "probe": "watch",
        "layer": LAYER,
        "token_pos": at,
        "score": ord("!"),
        "action": "abort",
    }
    assert last.undercurrent["scores"][-1]["action"] == "abort"


def test_a_probe_that_stops_an_answer_says_so_in_the_whole_response_too() -> None:
    with running(condemned(), [point("guard", "watch")]) as server:
        text = server.client.completions.create(model=MODEL, prompt=PROMPT)
        chat = server.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    assert (text.choices[0].finish_reason, text.choices[0].text) == ("content_filter", "Fine. No!")
    assert (chat.choices[0].finish_reason, chat.choices[0].message.content) == ("content_filter", "Fine. No!")
    assert text.undercurrent["stopped"]["token_pos"] == FIRST + 8
    assert [one["token_pos"] for one in text.undercurrent["scores"]] == list(range(FIRST, FIRST + 9))
    assert text.usage is not None
    assert text.usage.completion_tokens == 10


def test_a_prompt_that_is_condemned_gets_no_text() -> None:
    with running(points=[point("guard", "watch", position="*")]) as server:
        done = server.client.completions.create(model=MODEL, prompt="Stop!")
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("", "content_filter")
    assert done.undercurrent["stopped"]["token_pos"] == 4


def test_a_probe_that_speaks_when_the_text_has_just_ended_is_heard() -> None:
    adapter = ScriptedAdapter(text="No!.", ends_with="stop")
    with running(adapter, [point("guard", "watch")]) as server:
        done = server.client.completions.create(model=MODEL, prompt=PROMPT)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("No!", "content_filter")
    assert done.undercurrent["stopped"]["token_pos"] == FIRST + 2


def test_a_flag_is_told_and_stops_nothing() -> None:
    flags = point("guard", "watch", probe_args={"action": "flag"})
    with running(condemned(), [flags]) as server:
        done = server.client.completions.create(model=MODEL, prompt=PROMPT)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("Fine. No! Never.", "length")
    assert "stopped" not in done.undercurrent
    assert [one["action"] for one in done.undercurrent["scores"]].count("flag") == 1


def test_probes_that_break_do_not_break_the_answer() -> None:
    broken = [point("broken", "raising"), point("guard", "watch"), point("odd", "odd")]
    with running(points=broken) as server:
        done = server.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3)
        streamed = list(server.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, stream=True))
    extra = done.undercurrent
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("Hel", "length")
    assert extra["errors"] == [
        {"point": "broken", "probe": "raising", "token_pos": FIRST},
        {"point": "broken", "probe": "raising", "token_pos": FIRST + 1},
    ]
    assert [one["score"] for one in extra["scores"] if one["point"] == "guard"] == [ord("H"), ord("e")]
    assert [one["score"] for one in extra["scores"] if one["point"] == "odd"] == [None, None]
    assert [(one["point"], one["verdict"], one["score"]) for one in extra["results"]] == [
        ("broken", "error", None),
        ("guard", "done", ord("e")),
        ("odd", None, 2.0),
    ]
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Hel"


def test_an_async_probe_has_a_result_and_no_scores() -> None:
    watching = point("watching", "watch", execution_mode="async")
    with running(condemned(), [watching]) as server:
        done = server.client.completions.create(model=MODEL, prompt=PROMPT)
    assert done.choices[0].finish_reason == "length"
    extra = done.undercurrent
    assert extra["scores"] == []
    assert extra["results"] == [{"point": "watching", "probe": "watch", "verdict": "done", "score": ord("v")}]


def test_requests_at_the_same_time_have_ids_and_answers_of_their_own(watched: Running) -> None:
    def ask(n: int) -> tuple[str, str, int]:
        raw = watched.client.completions.with_raw_response.create(model=MODEL, prompt="x" * n)
        done = raw.parse()
        assert done.id == f"cmpl-{raw.headers['x-request-id']}"
        assert done.usage is not None
        return done.id, done.choices[0].text, done.usage.prompt_tokens

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(1, 25)))
    assert len({answer[0] for answer in answers}) == 24
    assert {answer[1] for answer in answers} == {"Hello, world."}
    assert [answer[2] for answer in answers] == list(range(1, 25))
    assert watched.adapter.registered == {}
