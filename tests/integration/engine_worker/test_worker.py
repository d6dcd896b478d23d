"""The engine worker as a process, with a scripted engine, on both brokers."""

from __future__ import annotations

import pytest

from undercurrent.kafka.client import Assignor
from undercurrent.protocol.messages import (
    AckOutcome,
    ActivationBlock,
    Outcome,
    StreamEnded,
    StreamStarted,
)
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.fake_engine import generated_text

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]


@pytest.fixture
def bench(broker, tmp_path):
    assignor = Assignor.COOPERATIVE_STICKY if Assignor.COOPERATIVE_STICKY in broker.assignors else Assignor.RANGE
    with EngineBench(broker.settings(), tmp_path, assignor=assignor) as built:
        yield built


def test_prompts_become_text_activations_and_one_final_each(bench):
    worker = bench.start_worker(bench.configure())
    worker.wait_ready()
    ids = bench.send([f"prompt {number}" for number in range(12)], max_tokens=24)
    finals = bench.wait_finals(ids)
    texts, streams = bench.texts(), bench.activations()
    for number, request_id in enumerate(ids):
        (final,) = finals[request_id]
        prompt_tokens = len(f"prompt {number}")
        assert (final.outcome, final.finish_reason) == (Outcome.COMPLETED, "length")
        assert (final.generated_tokens, final.prompt_tokens) == (24, prompt_tokens)
        assert texts[request_id] == generated_text(request_id, 24)
        messages = streams[request_id, final.attempt]
        assert isinstance(messages[0], StreamStarted)
        assert isinstance(messages[-1], StreamEnded)
        assert [m.seq for m in messages] == list(range(len(messages)))
        rows = sum(len(m.positions) // 4 for m in messages if isinstance(m, ActivationBlock))
        assert rows == prompt_tokens + 24 - 1
    assert worker.terminate() == 0, worker.tail()


def test_an_abort_stops_a_running_request_and_is_acknowledged_once(bench):
    worker = bench.start_worker(bench.configure())
    worker.wait_ready()
    (request_id,) = bench.send(["a long one"], max_tokens=4000)
    bench.wait(lambda: request_id in bench.between_tokens(), "first tokens")
    command = bench.abort(request_id)
    (final,) = bench.wait_finals([request_id])[request_id]
    assert (final.outcome, final.finish_reason) == (Outcome.ABORTED, "abort")
    assert final.abort.command_id == command
    assert 0 < final.generated_tokens < 4000
    late = bench.abort(request_id)
    acks = bench.wait(lambda: (a := bench.acks()) and late in a and a, "the second answer")
    (ack,) = acks[command]
    assert (ack.outcome, ack.token_index) == (AckOutcome.APPLIED, final.generated_tokens)
    assert ack.captured_at_us < ack.published_at_us < ack.decided_at_us <= ack.received_at_us <= ack.applied_at_us
    assert [a.outcome for a in acks[late]] == [AckOutcome.ALREADY]
    assert worker.terminate() == 0, worker.tail()
