"""A bare server whose clients say what their requests are called: vLLM's module, one API server, one process less."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))

from serve_bench import ServeBench, complete, ordered

from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.protocol.messages import AckOutcome, EndReason
from undercurrent.testing.canaries import CANARY_ENVIRONMENT
from undercurrent.testing.tiny_models import build_tiny_model

HOLDOUT = HoldoutRule(share=0.2)
pytestmark = [pytest.mark.kafka, pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.alone]


@pytest.fixture(scope="module")
def bench(apache_broker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trusted")
    model = build_tiny_model("llama", folder / "model", max_len=4096)
    with ServeBench(apache_broker.settings(), folder, model) as made:
        yield made


@pytest.fixture(scope="module")
def server(bench):
    sections = {"brake": {"max_abort_share": 0.5, "window": 4, "min_requests": 4}, "holdout_share": HOLDOUT.share}
    capture = bench.capture_file(sections, static=["residual"], trust_client_ids=True)
    started = bench.serve(["-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"], capture)
    bench.start_host()
    return started.wait_ready()


def named(bench, request_id):
    """Return the streams of a name, by attempt."""
    return {key[1]: messages for key, messages in bench.streams().items() if key[0] == request_id}


def test_an_abort_that_comes_before_its_request_stops_it_before_its_first_token(bench, server):
    done = complete(server, "Done", max_tokens=2)
    command = bench.abort("planned")
    # Commands are read in order: when the second one is answered, the first one is known.
    second = bench.abort(done.id)
    assert bench.wait(lambda: bench.acks().get(second), "an answer")[0].outcome is AckOutcome.TOO_LATE
    answer = complete(server, "Never begun", max_tokens=2000, extra_body=ordered(request_id="planned"))
    assert answer.choices[0].finish_reason == "abort"
    (ack,) = bench.wait(lambda: bench.acks().get(command), "an answer to the operator")
    assert (ack.outcome, ack.token_index, ack.engine) == (AckOutcome.APPLIED, 0, "chat-0.api0")
    assert answer.usage.completion_tokens == 0
    # It binds until it is answered, and not longer.
    after = complete(server, "Now it runs", max_tokens=3, extra_body=ordered(request_id="planned"))
    assert after.choices[0].finish_reason == "length"


def test_an_id_used_again_is_a_later_attempt_and_one_in_use_is_not_shared(bench, server):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            complete,
            server,
            "The first of its name",
            max_tokens=1500,
            extra_body={"ignore_eos": True, **ordered(request_id="mine")},
        )
        bench.wait(lambda: named(bench, "mine"), "its stream")
        second = complete(server, "Another of that name", max_tokens=4, extra_body=ordered(request_id="mine"))
        bench.stream(second.id)
        running.result()
    third = complete(server, "After both", max_tokens=4, extra_body=ordered(request_id="mine"))
    assert third.choices[0].finish_reason
    bench.wait(lambda: len(named(bench, "mine")) == 2, "the stream of the third")
    first, last = sorted(named(bench, "mine").items())
    assert first[0] < last[0]
    assert len(first[1]) > 1000
    assert bench.metric("undercurrent_publisher_capture_faults_total") == 1
    # A command that names the attempt that is over does not meet a later one.
    command = bench.abort("mine", attempt=first[0])
    (ack,) = bench.wait(lambda: bench.acks().get(command), "an answer")
    assert ack.outcome is AckOutcome.TOO_LATE


def stopped(bench, server, name):
    """Run a request that a probe wants to stop; return the answer to that, and whether it was stopped."""
    answer = complete(
        server,
        "A probe stops this at its first row.",
        max_tokens=800,
        extra_body={"ignore_eos": True, **ordered(points=["mlp"], request_id=name)},
        timeout=240.0,
    )
    (ack,) = bench.wait(lambda: bench.acks_of(name), "an answer to the probe")
    assert ack.probe == "loud"
    return ack.outcome, answer.choices[0].finish_reason == "abort"


def test_a_probe_that_stops_too_many_is_braked_until_it_is_resumed_and_none_stops_what_is_held_out(
    bench, server, monkeypatch
):
    held, *free = sorted((f"asked-{n}" for n in range(50)), key=HOLDOUT.holds, reverse=True)
    free = [name for name in free if not HOLDOUT.holds(name)]
    assert HOLDOUT.holds(held)
    for _ in range(4):
        complete(server, "Let alone", max_tokens=1)
    assert stopped(bench, server, held) == (AckOutcome.HELD_OUT, False)
    assert [stopped(bench, server, name) for name in free[:3]] == [
        (AckOutcome.APPLIED, True),
        (AckOutcome.APPLIED, True),
        (AckOutcome.BRAKED, False),
    ]
    log = server.log.read_text()
    assert log.count("probe loud is braked") == 1
    assert log.count(f"holdout: no probe stops {HOLDOUT.share:g} of the requests") == 1
    for key, value in CANARY_ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    assert run(app, PROG_NAME, ["probe", "resume", "loud", "--config", str(bench.folder / "host.yaml")]) == 0
    bench.wait(lambda: "probe loud is listened to again" in server.log.read_text(), "the brake to be lifted")
    assert stopped(bench, server, free[3]) == (AckOutcome.APPLIED, True)


def test_a_server_that_is_asked_to_end_leaves_no_stream_without_an_end(bench, server):
    publisher = bench.publisher()
    with ThreadPoolExecutor(1) as pool:
        # A server waits for its connections: this client gives up on an answer that never comes.
        asked = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}, "timeout": 30.0}
        running = pool.submit(complete, server, "Cut off", **asked)
        bench.wait(lambda: bench.metric("undercurrent_publisher_open_streams") > 0, "its stream")
        server.terminate()
        # Or its engine still came to say so.
        assert running.exception(120) is not None or running.result().choices[0].finish_reason == "abort"
    server.wait(120)
    publisher.wait(30)
    newest = max(bench.streams().values(), key=lambda messages: messages[0].started_at_us)
    assert newest[-1].reason in (EndReason.LOST, EndReason.FINISHED)
