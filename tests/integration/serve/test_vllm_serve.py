"""A bare vLLM server with two API servers: it captures, publishes, and stops what a probe wants stopped."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))

from serve_bench import HERE, LAYER, MODEL, WIDTH, ServeBench, client_of, complete, ordered
from transformers import AutoTokenizer

from undercurrent.codec import as_array, positions, token_ids
from undercurrent.protocol.dead_letters import Place, origin, said_of
from undercurrent.protocol.messages import AckOutcome, EndReason, EngineStarted, PublisherStarted
from undercurrent.testing.canaries import CANARIES, TEXT_CANARY, command_lines, found_canaries, found_texts
from undercurrent.testing.tiny_models import build_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.alone]


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


def test_a_streamed_chat_is_captured_under_the_id_that_its_client_gave(bench, server):
    with client_of(server) as client:
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=5,
                stream=True,
                extra_headers={"X-Request-Id": "mine-17"},
            )
        )
    assert chunks[0].id == "chatcmpl-mine-17"
    messages = bench.stream("chatcmpl-mine-17-")
    rows_of(messages)
    assert messages[0].request_id != "chatcmpl-mine-17", "a client's own id is a label: it cannot be somebody else's"


def test_an_order_adds_a_point_to_those_that_are_always_captured(bench, server):
    answer = complete(server, "Twice", n=2, max_tokens=6, temperature=1, extra_body=ordered(points=["mlp"]))
    for child in (0, 1):
        for point in ("residual", "mlp"):
            where, _ = rows_of(bench.stream(f"{child}_{answer.id}", point))
            assert where[0] == 0
    plain = complete(server, "Once")
    bench.stream(plain.id)
    assert not [key for key in bench.streams("mlp") if plain.id in key[0]]


def test_a_probe_stops_generations_in_either_api_server_before_their_first_token(bench, server):
    acks = []
    for round_ in range(12):
        prompt = [65 + (round_ + i) % 26 for i in range(3500)]
        answer = complete(server, prompt, max_tokens=500, extra_body=ordered(points=["mlp"]))
        assert answer.choices[0].finish_reason == "abort"
        (started, *_, ended) = bench.stream(answer.id, "mlp")
        assert ended.reason is EndReason.FINISHED
        (ack,) = bench.wait(lambda id_=started.request_id: bench.acks_of(id_), "an answer to the abort")
        assert ack.outcome is AckOutcome.APPLIED
        assert ack.token_index == answer.usage.completion_tokens
        assert ended.last_pos < 3500 + ack.token_index
        assert ack.captured_at_us < ack.published_at_us < ack.decided_at_us < ack.received_at_us < ack.applied_at_us
        acks.append(ack)
        if round_ > 2 and len({ack.engine for ack in acks}) == 2:
            break
    assert {ack.engine for ack in acks} == {"chat-0.api0", "chat-0.api1"}
    assert 0 in {ack.token_index for ack in acks}
    assert len({ack.command_id for ack in acks}) == len(acks), "each is answered once, by the server that has it"


def test_an_operator_stops_what_a_client_is_being_told(bench, server):
    with client_of(server) as client:
        stream = client.completions.create(
            model="tiny",
            prompt="On and on",
            max_tokens=4000,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [next(iter(stream))]
        command = bench.abort(chunks[0].id)
        chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "abort"
    assert len(chunks) < 3500
    (ack,) = bench.wait(lambda: bench.acks().get(command), "an answer to the operator")
    assert (ack.outcome, ack.request_id) == (AckOutcome.APPLIED, chunks[0].id)
    rows_of(bench.stream(chunks[0].id))
    late = bench.abort(chunks[0].id)
    (again,) = bench.wait(lambda: bench.acks().get(late), "an answer to the second command")
    assert again.outcome is AckOutcome.ALREADY
    done = complete(server, "Short")
    command = bench.abort(done.id)
    assert bench.wait(lambda: bench.acks().get(command), "an answer")[0].outcome is AckOutcome.TOO_LATE


HOSTILE = [
    "", "{", "null", "[]", "1e999", "[" * 9000, "9" * 9000, "x" * 200_000, 7, 0.5, ["a", "b"], [1e300],
    json.dumps({"points": ["mlp"] * 1000}), json.dumps({"points": ["nowhere"]}), json.dumps({"points": "mlp"}),
    json.dumps({"request_id": "chatcmpl-mine-17"}), json.dumps({"attempt": 2**70}), json.dumps({"partition": 1}),
    json.dumps({"points": ["\ud800"]}), json.dumps({"tenant": "x" * 2000}), json.dumps({"engine_id": "\x00"}),
]  # fmt: skip


def test_what_hostile_clients_send_by_the_hundred_changes_nobody_elses_stream(bench, server):
    quiet = complete(server, "Nobody may touch this.", max_tokens=40)
    _, expected = rows_of(bench.stream(quiet.id))
    faults = bench.metric("undercurrent_publisher_capture_faults_total")

    def attack(number):
        name = (b"same", b"x" * 4000, b"0_same", b"\xe9\xff\x80", b"a\tb", b"sha256-")[number % 6]
        asked = {"model": "tiny", "prompt": "attack", "max_tokens": 2, "temperature": 0}
        asked["vllm_xargs"] = {"undercurrent": HOSTILE[number % len(HOSTILE)], "undercurrent.slot": number}
        # Without that header the id is the body's, where it may be anything.
        asked["request_id"] = ("line\nbreak", "y" * 100_000, "a\x00b")[number % 3]
        headers = {} if number % 5 == 0 else {b"X-Request-Id": name}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, headers=headers, timeout=60)
        return answer.raise_for_status().json()

    with ThreadPoolExecutor(8) as pool:
        attacks = [pool.submit(attack, number) for number in range(15 * len(HOSTILE))]
        victims = [complete(server, "Nobody may touch this.", max_tokens=40) for _ in range(3)]
        answers = [future.result() for future in attacks]
    assert all(answer["choices"][0]["finish_reason"] for answer in answers)
    for victim in victims:
        assert victim.choices[0].text == quiet.choices[0].text
        _, rows = rows_of(bench.stream(victim.id))
        assert np.allclose(rows, expected, rtol=1e-3, atol=1e-3)
    after = complete(server, "Nobody may touch this.", max_tokens=40)
    assert np.allclose(rows_of(bench.stream(after.id))[1], expected, rtol=1e-3, atol=1e-3)
    for messages in bench.streams().values():
        rows_of(messages)
    assert bench.metric("undercurrent_publisher_capture_faults_total") - faults == len(attacks)
    # Static capture cannot be got rid of: each of them has a stream of its own all the same.
    prompts = [messages[0].prompt_len for messages in bench.streams().values()]
    assert prompts.count(answers[0]["usage"]["prompt_tokens"]) == len(attacks)


def test_no_row_behind_a_stop_string_is_published(bench, server):
    """The API server finds it, late here, while the engine computes on: those tokens no client was told."""
    asked = {
        "model": "tiny", "prompt": "Where does it end?", "temperature": 1, "seed": 7, "extra_body": {"ignore_eos": True}
    }  # fmt: skip
    whole = complete(server, **{key: value for key, value in asked.items() if key != "model"}, max_tokens=300)
    text, prompt = whole.choices[0].text, whole.usage.prompt_tokens
    half = len(text) // 2
    # Each ends in its own place, and late enough.
    stops = [s for s in (text[at : at + 5] for at in range(half, len(text) - 5, 7)) if text.index(s) >= half][:4]
    held, past = "undercurrent_publisher_held_bytes", "undercurrent_publisher_rows_past_end_total"
    before = bench.metric(past)
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(server)) for _ in stops]
        options = {"stream": True, "max_tokens": 3000, "stream_options": {"include_usage": True}}
        running = [
            client.completions.create(**asked, **options, stop=stop)
            for client, stop in zip(clients, stops, strict=True)
        ]
        first = [next(iter(stream)) for stream in running]
        for process in server.api_servers():
            process.suspend()
        try:
            bench.wait(lambda: bench.metric(held) > 4 * 400 * 4 * WIDTH, "rows that nobody confirms")
        finally:
            for process in server.api_servers():
                process.resume()
        rest = [list(stream) for stream in running]
    stopped = 0
    for begun, chunks in zip(first, rest, strict=True):
        stopped += "stop" in {chunk.choices[0].finish_reason for chunk in chunks if chunk.choices}
        told = chunks[-1].usage.completion_tokens
        where, _ = rows_of(bench.stream(begun.id))
        assert where.tolist() == list(range(len(where)))
        assert prompt + told - 1 <= len(where) <= prompt + told, "every row of what the client was told, none behind it"
    assert stopped >= 2
    assert bench.metric(past) - before > stopped * 50
    assert bench.wait(lambda: bench.metric(held) == 0, "nothing that waits")


def test_the_last_position_is_the_one_that_the_client_was_told_last(bench, server):
    whole = complete(server, "Which was the last?", max_tokens=60)
    stop = whole.choices[0].text[30:34]
    for ends in ({"max_tokens": 20}, {"max_tokens": 60, "stop": stop}):
        answer = complete(server, "Which was the last?", extra_body=ordered(points=["last"]), **ends)
        where, rows = rows_of(bench.stream(answer.id))
        ((last,), (row,)) = rows_of(bench.stream(answer.id, "last"))
        assert last == answer.usage.prompt_tokens + answer.usage.completion_tokens - 2
        assert np.array_equal(row, rows[where.tolist().index(last)])


def test_clients_that_go_away_leave_streams_that_end_with_what_they_were_told(bench, server):
    """Fifty in a row, each in mid-stream: no request goes on, no stream stays open, no memory stays taken."""
    prompt = "Somebody reads this for a while."
    whole = complete(server, prompt, max_tokens=400, extra_body={"ignore_eos": True, "return_token_ids": True})
    expected = [*whole.choices[0].prompt_token_ids, *whole.choices[0].token_ids]
    first, sizes = whole.usage.prompt_tokens, []
    ids = []
    for number in range(50):
        with client_of(server) as client:
            stream = client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=4000,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            chunks = [chunk for chunk, _ in zip(stream, range(2 + number % 7), strict=False)]
            ids.append(chunks[0].id)
            stream.close()
        if number % 25 == 24:
            sizes.append(sum(process.memory_info().rss for process in server.family()))
    streams = [bench.stream(answer_id) for answer_id in ids]
    for number, messages in enumerate(streams):
        where, _ = rows_of(messages)
        assert messages[-1].reason is EndReason.FINISHED
        assert first + 1 + number % 7 <= len(where) < first + 400
        assert where.tolist() == list(range(len(where)))
        tokens = np.concatenate([token_ids(block) for block in messages[1:-1]])
        assert tokens.tolist() == expected[: len(where)]
    judged = bench.wait(
        lambda: (said := bench.results()).keys() >= {m[0].request_id for m in streams} and said, "every verdict"
    )
    for messages in streams:
        verdict = judged[messages[0].request_id]
        assert (verdict.scored, verdict.missing, verdict.complete) == (messages[-1].emitted[0], 0, True)
    bench.wait(lambda: bench.metric("undercurrent_publisher_open_streams") == 0, "no open stream")
    pages = bench.wait(lambda: (page := metrics_of(server)) and idle(page) and page, "an idle engine")
    assert "kv_cache_usage_perc" in pages
    assert sizes[1] - sizes[0] < 48 << 20, f"25 more clients took {(sizes[1] - sizes[0]) >> 20} MiB"


def metrics_of(server):
    return httpx.get(f"{server.url}/metrics", timeout=10).text


def idle(page):
    """Whether vLLM's own page says that nothing runs, waits, or has memory."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc")
    values = [float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(names)]
    return bool(values) and not any(values)


def test_a_foreign_extension_has_its_place(bench, server):
    assert "the foreign extension is imported" in server.log.read_text()


def test_a_publisher_that_dies_is_replaced_and_the_engine_serves_on(bench, server):
    def incarnations():
        topic = bench.plan.activations("residual")
        return {m.incarnation for _, m in bench.messages(topic) if isinstance(m, PublisherStarted)}

    (first,) = incarnations()
    publisher = bench.publisher()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, server, "A long one", max_tokens=600, extra_body={"ignore_eos": True})
        bench.wait(lambda: bench.metric("undercurrent_publisher_open_streams") > 0, "its stream")
        publisher.kill()
        answer = running.result()
    assert answer.usage.completion_tokens == 600
    bench.wait(lambda: len(incarnations()) == 2, "another publisher", 90)
    next_one = complete(server, "After it")
    messages = bench.stream(next_one.id)
    rows_of(messages)
    assert messages[0].incarnation == max(incarnations()) > first
    names = {m.engine for _, m in bench.messages(bench.plan.acks) if isinstance(m, EngineStarted)}
    assert names == {"chat-0.dp0", "chat-0.api0", "chat-0.api1"}


def test_no_secret_stands_in_any_log_page_command_line_or_file(bench, server):
    """The settings hold a password from a file, one as it is, and a token from the environment."""
    assert bench.capture_secrets() == tuple(CANARIES.values()), "the settings do not hold what is looked for"
    pages = [metrics_of(server), bench.page("/metrics")]
    processes = [*server.family(), bench.publisher(), *bench.host_processes()]
    commands = command_lines(process.pid for process in processes)
    assert "engine_worker.sidecar" in commands
    texts = {"pages": "\n".join(pages), "command lines": commands, **bench.log_texts()}
    cache = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache/vllm"))
    touched = [path for path in cache.rglob("*") if path.is_file() and path.stat().st_mtime > bench.began_s]
    files = {str(path): path.read_bytes() for path in touched if path.stat().st_size}
    assert found_canaries({**texts, **files}) == []


def test_nothing_repeats_what_a_client_wrote(bench, server):
    """Nor what stands on a topic and is no message."""
    tokens = AutoTokenizer.from_pretrained(bench.model)(TEXT_CANARY)["input_ids"]
    answer = complete(server, TEXT_CANARY, stop=[TEXT_CANARY], user=TEXT_CANARY)
    complete(server, tokens)
    order = json.dumps({"points": [TEXT_CANARY], TEXT_CANARY: TEXT_CANARY})
    for raw in (TEXT_CANARY, order, json.dumps([TEXT_CANARY])):
        complete(server, TEXT_CANARY, extra_body={"vllm_xargs": {"undercurrent": raw}})
    message = {"role": "user", "content": TEXT_CANARY}
    refused = [
        ("completions", {"prompt": TEXT_CANARY * 1000, "max_tokens": 1}),
        ("completions", {"prompt": TEXT_CANARY, "max_tokens": -1}),
        ("completions", {"prompt": TEXT_CANARY, "max_tokens": TEXT_CANARY}),
        ("completions", {"prompt": TEXT_CANARY, "vllm_xargs": {"undercurrent": {TEXT_CANARY: 1}}}),
        ("chat/completions", {"messages": [{**message, "role": TEXT_CANARY}], "max_tokens": "x"}),
        ("chat/completions", {"messages": TEXT_CANARY}),
    ]
    for path, body in refused:
        asked = {"model": MODEL, "temperature": 0, **body}
        assert httpx.post(f"{server.url}/v1/{path}", json=asked, timeout=60).status_code >= 400, path
    with client_of(server) as client:
        client.chat.completions.create(model=MODEL, messages=[message], max_tokens=2)
    for topic in (bench.plan.control, bench.plan.rollouts):
        bench.write(topic, 0, b"r", TEXT_CANARY.encode())
        bench.wait(lambda topic=topic: bench.read(bench.plan.dlq(topic)), f"a dead letter of {topic}")
    bench.stream(answer.id)
    pages = [metrics_of(server), bench.page("/metrics"), bench.page("/readyz")]
    processes = [*server.family(), bench.publisher(), *bench.host_processes()]
    texts = {"pages": "\n".join(pages), "command lines": command_lines(p.pid for p in processes), **bench.log_texts()}
    assert found_texts(texts, tokens=tokens) == []
    # It is looked for as it is recorded.
    recorded = b"".join(record.value for record in bench.read(bench.plan.activations("residual")))
    assert found_texts({"records": recorded}, tokens=tokens) == ["int32 in records"]


def test_what_nobody_can_read_becomes_a_dead_letter_once_and_stops_no_command(bench, server):
    plan = bench.plan
    begun = {topic: len(bench.read(plan.dlq(topic))) for topic in plan.swept}
    written = [(topic, bench.write(topic, 0, b"k", b"nonsense")) for topic in (plan.control, plan.rollouts) * 2]
    done = complete(server, "Short")
    command = bench.abort(done.id)
    assert bench.wait(lambda: bench.acks().get(command), "an answer")[0].outcome is AckOutcome.TOO_LATE
    others = (plan.acks, plan.verdicts, plan.labels, plan.probe_state)
    written += [(topic, bench.write(topic, 0, b"k", b"nonsense")) for topic in others]

    def letters():
        read = {topic: bench.read(plan.dlq(topic))[begun[topic] :] for topic in plan.swept}
        found = [record for records in read.values() for record in records]
        return found if len(found) >= len(written) else None

    found = bench.wait(letters, "a letter of each")
    assert Counter(origin(record.headers) for record in found) == {Place(t, 0, offset): 1 for t, offset in written}
    assert {(r.value, said_of(r.headers)["service"]) for r in found} == {(b"nonsense", "chat-0.dp0")}
    count = bench.metric("undercurrent_engine_unreadable_records_total")
    assert count == sum(begun.values()) + len(written)


def test_an_api_server_that_is_killed_leaves_nothing_that_waits_for_it(bench, server):
    """Nobody says any more how long its requests are: what waited for that is lost, declared, and ended."""
    publisher = bench.publisher()
    with ThreadPoolExecutor(8) as pool:
        asked = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
        running = [pool.submit(complete, server, "Cut off", **asked) for _ in range(8)]
        bench.wait(lambda: bench.metric("undercurrent_publisher_open_streams") == 8, "their streams")
        server.api_servers()[1].kill()
        assert server.wait(60) != 0
        assert all(future.exception(60) for future in running)
    publisher.wait(40)
    newest = sorted(bench.streams().values(), key=lambda messages: messages[0].started_at_us)[-8:]
    for messages in newest:
        assert messages[-1].reason in (EndReason.LOST, EndReason.FINISHED)
        assert len(messages) < 3000
