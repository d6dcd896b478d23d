"""The engine worker as a process, with a scripted engine, on both brokers."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from undercurrent.codec import positions
from undercurrent.kafka.client import Assignor
from undercurrent.protocol.generations import Ruling
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.protocol.messages import (
    AckOutcome,
    ActivationBlock,
    BindingMode,
    BoundProbe,
    GenerationKind,
    GuardState,
    Holdout,
    Outcome,
    ProbeHeartbeat,
    ProbeVerdict,
    PromptRequest,
    Rollout,
    RolloutChange,
    Sampling,
    StreamEnded,
    StreamStarted,
    VerdictAction,
    VerdictKind,
)
from undercurrent.protocol.rollouts import key_of
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.fake_engine import generated_text
from undercurrent.topics import partition_of

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


def test_rows_that_an_engine_computes_past_an_end_are_not_published(bench):
    worker = bench.start_worker(bench.configure(engine={"kind": "fake", "args": {"step_s": 0.002, "overrun": 5}}))
    worker.wait_ready()
    ids = bench.send([f"prompt {number}" for number in range(10)], max_tokens=20)
    (stopped,) = bench.send(["a long one"], max_tokens=4000)
    bench.wait(lambda: stopped in bench.between_tokens(), "first tokens")
    bench.abort(stopped)
    finals = bench.wait_finals([*ids, stopped])
    streams = bench.activations()
    for request_id in [*ids, stopped]:
        (final,) = finals[request_id]
        length = final.prompt_tokens + final.generated_tokens
        messages = streams[request_id, final.attempt]
        rows = np.concatenate([positions(m) for m in messages if isinstance(m, ActivationBlock)]).tolist()
        # Each step past the end computes one more row: the first of them is the last token's own.
        assert rows == list(range(length))
        assert isinstance(messages[-1], StreamEnded)
        assert (messages[-1].emitted[0], messages[-1].last_pos) == (length, length - 1)
        assert [m.seq for m in messages] == list(range(len(messages)))
    assert "undercurrent_publisher_rows_past_end_total 44.0" in worker.get("/metrics")[1]
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


def test_a_command_before_the_prompt_ends_it_without_running(bench):
    (request_id,) = bench.send(["never seen"], max_tokens=8)
    command = bench.abort(request_id)
    worker = bench.start_worker(bench.configure())
    (final,) = bench.wait_finals([request_id])[request_id]
    assert (final.outcome, final.generated_tokens) == (Outcome.ABORTED, 0)
    (claim,) = bench.starts()[request_id]
    assert claim.points == ()
    assert [(a.outcome, a.token_index) for a in bench.acks()[command]] == [(AckOutcome.APPLIED, 0)]
    assert bench.texts()[request_id] == ""
    assert worker.terminate() == 0, worker.tail()


def test_a_probes_command_for_another_attempt_is_stale(bench):
    worker = bench.start_worker(bench.configure())
    (request_id,) = bench.send(["x"], max_tokens=400)
    bench.wait(lambda: request_id in bench.between_tokens(), "first tokens")
    (claim,) = bench.starts()[request_id]
    command = bench.abort(request_id, attempt=claim.attempt - 1)
    (final,) = bench.wait_finals([request_id])[request_id]
    assert final.outcome is Outcome.COMPLETED
    assert [a.outcome for a in bench.acks()[command]] == [AckOutcome.STALE]
    assert worker.terminate() == 0, worker.tail()


def test_a_probe_gone_mad_is_braked_until_it_is_resumed_and_a_restart_remembers(bench):
    config = bench.configure(brake={"max_abort_share": 0.3, "window": 40, "min_requests": 10})
    worker = bench.start_worker(config)
    worker.wait_ready()

    def let_loose(count):
        ids = bench.send(["x"] * count, max_tokens=1200)
        bench.wait(lambda: set(ids) <= bench.between_tokens(), "first tokens")
        attempts = {request_id: claims[-1].attempt for request_id, claims in bench.starts().items()}
        commands = [bench.abort(request_id, attempt=attempts[request_id], probe="mad") for request_id in ids]
        acks = bench.wait(lambda: (a := bench.acks()) and set(commands) <= set(a) and a, "an answer to each")
        return ids, [acks[command][0] for command in commands]

    ids, acks = let_loose(20)
    outcomes = [ack.outcome for ack in acks]
    assert (outcomes.count(AckOutcome.APPLIED), outcomes.count(AckOutcome.BRAKED)) == (6, 14)
    assert {ack.probe for ack in acks} == {"mad"}
    finals = bench.wait_finals(ids)
    ended = {ack.request_id: finals[ack.request_id][0].outcome for ack in acks}
    assert all(
        ended[ack.request_id] is (Outcome.ABORTED if ack.outcome is AckOutcome.APPLIED else Outcome.COMPLETED)
        for ack in acks
    )
    bench.wait(lambda: 'undercurrent_engine_probe_braked{probe="mad"} 1.0' in worker.get("/metrics")[1], "the metric")
    assert 'undercurrent_engine_abort_acks_total{outcome="braked"} 14.0' in worker.get("/metrics")[1]
    assert worker.log.read_text().count("probe mad is braked") == 1

    (kept,) = bench.send(["x"], max_tokens=4000)
    bench.wait(lambda: kept in bench.between_tokens(), "first tokens")
    bench.abort(kept)
    (final,) = bench.wait_finals([kept])[kept]
    assert final.outcome is Outcome.ABORTED, "an operator is not braked"

    assert worker.terminate() == 0, worker.tail()
    worker = bench.start_worker(config)
    worker.wait_ready()
    _, acks = let_loose(2)
    assert [ack.outcome for ack in acks] == [AckOutcome.BRAKED] * 2
    resumed = Rollout(probe="mad", sequence=1, entry_id="e", change=RolloutChange.RESUME, created_at_us=0)
    bench.write(bench.plan.rollouts, 0, key_of(resumed), bench.codec.encode(resumed))
    bench.wait(lambda: "probe mad is listened to again" in worker.log.read_text(), "the brake to be lifted")
    ids, acks = let_loose(2)
    assert [ack.outcome for ack in acks] == [AckOutcome.APPLIED] * 2
    opened = [
        m for (name, _), ms in bench.activations().items() if name in ids for m in ms if isinstance(m, StreamStarted)
    ]
    assert [message.rollouts for message in opened] == [1, 1]
    assert worker.terminate() == 0, worker.tail()


def test_a_holdout_runs_to_its_end_whatever_a_probe_says(bench):
    rule = HoldoutRule(share=0.5, salt="ours")
    worker = bench.start_worker(bench.configure(holdout_share=rule.share, holdout_salt=rule.salt))
    worker.wait_ready()
    ids = [f"held-{number}" for number in range(16)]
    for request_id in ids:
        sampling = Sampling(max_tokens=1200)
        bench.send_request(PromptRequest(request_id=request_id, prompt="x", sampling=sampling, created_at_us=0))
    bench.wait(lambda: set(ids) <= bench.between_tokens(), "first tokens")
    attempts = {request_id: claims[-1].attempt for request_id, claims in bench.starts().items()}
    commands = {name: bench.abort(name, attempt=attempts[name], probe="guard") for name in ids}
    acks = bench.wait(lambda: (a := bench.acks()) and set(commands.values()) <= set(a) and a, "an answer to each")
    held = [name for name in ids if rule.holds(name)]
    assert 0 < len(held) < len(ids)
    operated = bench.abort(held[0])
    finals = bench.wait_finals(ids)
    for name in ids:
        (ack,), (final,) = acks[commands[name]], finals[name]
        assert ack.outcome is (AckOutcome.HELD_OUT if name in held else AckOutcome.APPLIED)
        aborted = name not in held or name == held[0]
        assert final.outcome is (Outcome.ABORTED if aborted else Outcome.COMPLETED)
        assert final.holdout == Holdout(share=0.5, held=name in held)
        assert aborted or final.generated_tokens == 1200
    assert finals[held[0]][0].abort.command_id == operated, "an operator's abort is applied"
    count = f'undercurrent_engine_abort_acks_total{{outcome="held_out"}} {len(held)}.0'
    bench.wait(lambda: count in worker.get("/metrics")[1], "the metric")
    log = worker.log.read_text()
    assert "no probe stops 0.5 of the requests" in log
    assert worker.terminate() == 0, worker.tail()


def test_bad_prompts_fail_with_a_reason_and_go_to_the_dead_letter_topic(bench):
    worker = bench.start_worker(bench.configure(engine={"kind": "fake", "args": {"max_model_len": 64}}))
    plan = bench.plan

    def bad(request_id, **fields):
        sampling = Sampling(**fields.pop("sampling", {"max_tokens": 4}))
        values = {"prompt": "p", "created_at_us": 0, "sampling": sampling, **fields}
        bench.send_request(PromptRequest(request_id=request_id, **values))
        return request_id

    failing = {
        bad("too-long", prompt="x" * 65): "more than the model's 64",
        bad("point", points=("nowhere",)): "unknown extraction points: nowhere; known: residual",
        bad("model", model="another"): "this engine serves 'fake'",
        bad("sampling", sampling={"temperature": float("nan")}): "sampling.temperature",
        bad("children", sampling={"n": 1000}): "sampling.n is 1000",
        bad("empty", prompt=None): "exactly one of",
    }
    bench.send_bytes(b"undecodable", b"\x00not avro")
    failing["undecodable"] = "no PromptRequest"
    homeless = bench.send_bytes(None, b"no key", partition=0)
    right = partition_of("misplaced", plan.prompt_partitions)
    good = PromptRequest(request_id="misplaced", prompt="p", sampling=Sampling(), created_at_us=0)
    bench.send_bytes(b"misplaced", bench.codec.encode(good), partition=1 - right)
    (after,) = bench.send(["a good one"], max_tokens=4)

    finals = bench.wait_finals([*failing, after])
    for request_id, reason in failing.items():
        (final,) = finals[request_id]
        assert final.outcome is Outcome.FAILED
        assert final.finish_reason == ("undecodable" if request_id == "undecodable" else "bad_request")
        assert reason in final.error, final.error
    assert finals[after][0].outcome is Outcome.COMPLETED
    letters = bench.wait(lambda: len(found := bench.dead_letters()) >= 9 and found, "nine dead letters")
    causes = {letter.key: dict(letter.headers)["undercurrent.cause"] for letter in letters}
    assert causes[None] == b"bad_key"
    assert causes[b"misplaced"] == b"bad_partition"
    assert causes[b"undecodable"] == b"undecodable"
    assert causes[b"point"] == b"bad_request"
    keyless = next(letter for letter in letters if letter.key is None)
    assert (keyless.value, keyless.partition) == (b"no key", 0)
    assert dict(keyless.headers)["undercurrent.offset"] == str(homeless).encode()
    assert "misplaced" not in finals
    assert worker.terminate() == 0, worker.tail()
    assert bench.audit(unjudged=plan.points) == []


def test_a_repeated_id_is_answered_and_never_run_again_even_by_a_later_worker(bench):
    request = PromptRequest(request_id="twice", prompt="p", sampling=Sampling(max_tokens=4), created_at_us=0)
    first = bench.start_worker(bench.configure())
    bench.send_request(request)
    bench.wait_finals(["twice"])
    assert first.terminate() == 0, first.tail()
    second = bench.start_worker(bench.configure())
    same = bench.send_request(request)
    other = bench.send_request(replace(request, prompt="q"))
    (after,) = bench.send(["next"], max_tokens=4)
    bench.wait_finals([after])

    def answers():
        found = {m.prompt_offset: m.kind for ruling, m in bench.judged() if ruling is Ruling.ANSWERED}
        return found if {same, other} <= set(found) else None

    found = bench.wait(answers, "answers to the repeated prompts")
    assert (found[same], found[other]) == (GenerationKind.DUPLICATE, GenerationKind.REFUSED)
    assert len(bench.starts()["twice"]) == 1
    assert second.terminate() == 0, second.tail()


def test_children_are_finished_one_by_one(bench):
    worker = bench.start_worker(bench.configure())
    (request_id,) = bench.send(["three of me"], max_tokens=6, n=3)
    bench.wait(lambda: len(bench.finals().get(request_id, ())) == 3, "three finals")
    assert sorted(final.index for final in bench.finals()[request_id]) == [0, 1, 2]
    assert worker.terminate() == 0, worker.tail()


def test_guards_are_absent_without_a_probe_host_and_complete_with_its_result(bench):
    worker = bench.start_worker(bench.configure(guards={"probes": ["secret"], "wait_s": 20.0}))
    worker.wait_ready()
    (alone,) = bench.send(["x"], max_tokens=4)
    (final,) = bench.wait_finals([alone])[alone]
    assert [(g.probe, g.clear_up_to, g.state) for g in final.guards] == [("secret", -1, GuardState.ABSENT)]
    stop = threading.Event()
    beats = threading.Thread(target=keep_beating, args=(bench, stop))
    beats.start()
    try:
        bench.wait(lambda: len(bench.read(bench.plan.verdicts)) > 2, "heartbeats")
        (guarded,) = bench.send(["y"], max_tokens=4)
        (claim,) = bench.wait(lambda: bench.starts().get(guarded), "its claim")
        write_result(bench, guarded, claim.attempt)
        (final,) = bench.wait_finals([guarded])[guarded]
    finally:
        stop.set()
        beats.join(30)
    assert [(g.probe, g.clear_up_to, g.state) for g in final.guards] == [("secret", 4, GuardState.COMPLETE)]
    assert worker.terminate() == 0, worker.tail()


def keep_beating(bench, stop):
    while not stop.wait(0.2):
        beat = ProbeHeartbeat(
            service="s",
            member="m",
            probes=(BoundProbe(probe="secret", point="residual", mode=BindingMode.ABORT),),
            partitions=(0, 1),
            sent_at_us=0,
        )
        bench.write(bench.plan.verdicts, 0, b"s", bench.codec.encode(beat))


def write_result(bench, request_id, attempt):
    verdict = ProbeVerdict(
        request_id=request_id,
        attempt=attempt,
        point="residual",
        probe="secret",
        service="s",
        kind=VerdictKind.RESULT,
        mode=BindingMode.ABORT,
        action=VerdictAction.CONTINUE,
        clear_up_to=4,
        source_partition=0,
        source_offset=0,
        decided_at_us=0,
    )
    bench.write(bench.plan.verdicts, 0, request_id.encode(), bench.codec.encode(verdict))


def test_health_metrics_and_readiness(bench):
    worker = bench.start_worker(bench.configure())
    worker.wait_ready()
    bench.wait_finals(bench.send(["p"] * 3, max_tokens=4))
    assert worker.get("/healthz")[0] == 200

    def counted():
        text = worker.get("/metrics")[1]
        return 'undercurrent_engine_requests_total{outcome="completed"} 3.0' in text and text

    text = bench.wait(counted, "three requests counted")
    for name in (
        "engine_requests_running",
        "engine_intake_paused",
        "publisher_ring_limit_bytes",
        "engine_tokens_total",
    ):
        assert f"undercurrent_{name}" in text
    # The publisher's counts come with its next report.
    published = 'undercurrent_publisher_records_total{point="residual"} 12.0'
    bench.wait(lambda: published in worker.get("/metrics")[1], "the publisher's records")
    assert worker.terminate() == 0, worker.tail()
