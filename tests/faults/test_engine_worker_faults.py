"""Engine workers that are killed, frozen, stopped and cut off between first and last token.

Whatever happens, the log says of each request exactly one final that counts. The scenes are functions of a configured
bench, so that they can be played with any engine.
"""

from __future__ import annotations

import psutil
import pytest

from undercurrent.kafka.client import Assignor
from undercurrent.protocol.generations import Ruling
from undercurrent.protocol.messages import (
    AckOutcome,
    Outcome,
    PublisherStarted,
    Released,
    ReleaseReason,
    StreamEnded,
)
from undercurrent.testing.brokers import QUICK, apache_kafka
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.fake_engine import generated_text
from undercurrent.testing.storm_record import taken_back

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]

# A killed member's partitions are free after this; production leaves more time.


@pytest.fixture
def bench(apache_broker, tmp_path):
    with EngineBench(apache_broker.settings(**QUICK), tmp_path) as built:
        yield built


def one_final_each(bench, ids, outcome=Outcome.COMPLETED):
    """Check the promise: for each request exactly one final that counts, and nothing that ran after it."""
    finals = bench.finals()
    for request_id in ids:
        assert [final.outcome for final in finals.get(request_id, ())] == [outcome], (request_id, bench.logs())
    voided = [message for ruling, message in bench.judged() if ruling is Ruling.CLOSED]
    assert len(voided) == len({(final.request_id, final.index) for final in voided})


def four_in_flight(bench, ids):
    """Wait until at least four of the requests are between their first and their last token."""
    return bench.wait(lambda: len(found := bench.between_tokens() & set(ids)) >= 4 and found, "four requests in flight")


def test_a_killed_worker_leaves_one_final_for_each_request(bench):
    config = bench.configure(engine={"kind": "fake", "args": {"step_s": 0.01}})
    first = bench.start_worker(config)
    first.wait_ready()
    ids = bench.send(["long"] * 6, max_tokens=600)
    done = bench.send(["short"] * 6, max_tokens=4)
    bench.wait_finals(done)
    hit = four_in_flight(bench, ids)
    first.kill()
    assert len(hit - set(bench.finals())) >= 4
    second = bench.start_worker(config)
    bench.wait_finals([*ids, *done], 120)
    one_final_each(bench, [*ids, *done])
    texts, starts = bench.texts(), bench.starts()
    assert all(texts[request_id] == generated_text(request_id, 600) for request_id in ids)
    assert all(len(starts[request_id]) == 1 for request_id in done)
    assert all(len(starts[request_id]) == 2 for request_id in hit)
    streams = bench.activations()
    for request_id in ids:
        (final,) = bench.finals()[request_id]
        assert isinstance(streams[request_id, final.attempt][-1], StreamEnded)
    announced = [m for _, m in bench.messages(bench.plan.activations("residual")) if isinstance(m, PublisherStarted)]
    assert len({m.incarnation for m in announced}) == 2
    assert second.terminate() == 0, second.tail()
    assert bench.audit(unjudged=bench.plan.points) == []


def test_hundreds_of_finished_prompts_above_an_open_one_are_not_run_again(apache_broker, tmp_path):
    with EngineBench(apache_broker.settings(**QUICK), tmp_path, partitions=1) as bench:
        config = bench.configure(engine={"kind": "fake", "args": {"step_s": 0.005, "max_model_len": 100_000}})
        first = bench.start_worker(config)
        (open_one,) = bench.send(["open"], max_tokens=6000)
        bench.wait(lambda: open_one in bench.between_tokens(), "the open one to run")
        ids = bench.send(["short"] * 500, max_tokens=2)
        bench.wait_finals(ids, 120)
        assert open_one in bench.between_tokens()
        first.kill()
        before = len(bench.read(bench.plan.generations))
        second = bench.start_worker(config)
        bench.wait(lambda: len(bench.starts()[open_one]) == 2, "the open one to run again")
        bench.abort(open_one)
        bench.wait_finals([open_one])
        after = {message.request_id for _, message in bench.messages(bench.plan.generations)[before:]}
        assert after == {open_one}
        assert all(len(bench.starts()[request_id]) == 1 for request_id in ids)
        one_final_each(bench, ids)
        assert second.terminate() == 0, second.tail()


def test_an_aborted_request_never_completes_though_its_worker_is_killed(bench):
    config = bench.configure(engine={"kind": "fake", "args": {"step_s": 0.01}})
    first = bench.start_worker(config)
    first.wait_ready()
    ids = bench.send(["long"] * 4, max_tokens=1500)
    four_in_flight(bench, ids)
    # Frozen, it cannot act on the command; killed, it never will.
    first.freeze()
    command = bench.abort(ids[0])
    first.kill()
    second = bench.start_worker(config)
    (final,) = bench.wait_finals(ids[:1])[ids[0]]
    assert (final.outcome, final.generated_tokens) == (Outcome.ABORTED, 0)
    streams = bench.activations()
    (_, first_claim), *_ = [(0, claim) for claim in bench.starts()[ids[0]]]
    last = streams[ids[0], first_claim.attempt][-1]
    assert isinstance(last, StreamEnded)
    acks = bench.wait(lambda: bench.acks().get(command), "the answer")
    assert [ack.outcome for ack in acks] == [AckOutcome.APPLIED]
    bench.wait_finals(ids, 120)
    one_final_each(bench, ids[1:])
    one_final_each(bench, ids[:1], Outcome.ABORTED)
    assert second.terminate() == 0, second.tail()


def test_sigterm_releases_what_it_cannot_finish_and_exits_0(bench):
    config = bench.configure(engine={"kind": "fake", "args": {"step_s": 0.01}}, limits={"shutdown_s": 1.0})
    first = bench.start_worker(config)
    first.wait_ready()
    ids = bench.send(["long"] * 5, max_tokens=1500)
    hit = four_in_flight(bench, ids)
    assert first.terminate(30) == 0, first.tail()
    released = [m for _, m in bench.judged() if isinstance(m, Released)]
    assert {m.request_id for m in released} >= hit
    assert {m.reason for m in released} == {ReleaseReason.SHUTDOWN}
    for request_id in hit:
        assert isinstance(bench.activations()[request_id, bench.starts()[request_id][0].attempt][-1], StreamEnded)
    second = bench.start_worker(config)
    bench.wait_finals(ids, 120)
    one_final_each(bench, ids)
    assert second.terminate(60) == 0, second.tail()


def test_sigterm_lets_short_requests_finish(bench):
    worker = bench.start_worker(bench.configure(engine={"kind": "fake", "args": {"step_s": 0.01}}))
    worker.wait_ready()
    ids = bench.send(["short"] * 5, max_tokens=200)
    hit = four_in_flight(bench, ids)
    assert worker.terminate(60) == 0, worker.tail()
    assert not [m for _, m in bench.judged() if isinstance(m, Released)]
    one_final_each(bench, hit)


@pytest.mark.parametrize("assignor", [Assignor.COOPERATIVE_STICKY, Assignor.CONSUMER])
def test_a_frozen_worker_that_thaws_completes_nothing_that_another_has_taken(apache_broker, tmp_path, assignor):
    # Under the broker-side protocol the session's length is the group's: the frozen member is expelled after it.
    options = QUICK if assignor is Assignor.COOPERATIVE_STICKY else {}
    with EngineBench(apache_broker.settings(**options), tmp_path, assignor=assignor) as bench:
        engine = {"kind": "fake", "args": {"step_s": 0.01}}
        first = bench.start_worker(bench.configure("engine-0", engine=engine))
        first.wait_ready()
        ids = bench.send(["long"] * 8, max_tokens=400)
        hit = four_in_flight(bench, ids)
        first.freeze()
        second = bench.start_worker(bench.configure("engine-1", engine=engine))
        bench.wait_finals(ids, 120)
        first.thaw()
        more = bench.send(["after the thaw"] * 8, max_tokens=20)
        bench.wait_finals(more)
        one_final_each(bench, [*ids, *more])
        taken = {request_id for request_id, claims in bench.starts().items() if len(claims) == 2}
        assert taken >= hit
        # What the first one still ended was no longer its own, and is in no commit.
        assert not taken_back(bench)
        assert [w.terminate(60) for w in (first, second)] == [0, 0], bench.logs()
        assert bench.audit(unjudged=bench.plan.points) == []


def test_a_second_worker_takes_over_while_requests_run(bench):
    engine = {"kind": "fake", "args": {"step_s": 0.01}}
    first = bench.start_worker(bench.configure("engine-0", engine=engine, limits={"handover_s": 1.0}))
    first.wait_ready()
    ids = bench.send(["long"] * 10, max_tokens=900)
    four_in_flight(bench, ids)
    second = bench.start_worker(bench.configure("engine-1", engine=engine))
    bench.wait_finals(ids, 120)
    one_final_each(bench, ids)
    reasons = {m.reason for _, m in bench.judged() if isinstance(m, Released)}
    assert reasons == {ReleaseReason.HANDED_OVER}
    assert {claim.engine for claims in bench.starts().values() for claim in claims} == {"engine-0", "engine-1"}
    assert [w.terminate(60) for w in (first, second)] == [0, 0], bench.logs()


def test_a_broker_that_pauses_costs_time_and_nothing_else(tmp_path):
    # Shorter than its session with the controller: it is not fenced, and goes on where it stood.
    with (
        apache_kafka(properties={"broker.session.timeout.ms": "30000"}) as broker,
        EngineBench(broker.settings(), tmp_path) as bench,
    ):
        worker = bench.start_worker(bench.configure(engine={"kind": "fake", "args": {"step_s": 0.01}}))
        worker.wait_ready()
        ids = bench.send(["long"] * 6, max_tokens=300)
        four_in_flight(bench, ids)
        process = psutil.Process(worker.pid)
        broker.pause()
        used = process.cpu_times()
        gone, _ = psutil.wait_procs([process], timeout=6.0)
        spent = process.cpu_times()
        broker.resume()
        assert not gone, worker.tail()
        # Six seconds of a stopped broker: a client that spins would burn all of them.
        assert spent.user + spent.system - used.user - used.system < 4.0
        bench.wait_finals(ids, 120)
        one_final_each(bench, ids)
        assert worker.terminate(60) == 0, worker.tail()


def test_a_dead_publisher_is_replaced_and_its_worker_goes_on(bench):
    limits = {"stream_end_timeout_s": 1.0}
    worker = bench.start_worker(bench.configure(engine={"kind": "fake", "args": {"step_s": 0.01}}, limits=limits))
    worker.wait_ready()
    ids = bench.send(["long"] * 5, max_tokens=300)
    four_in_flight(bench, ids)
    worker.publisher.kill()
    bench.wait_finals(ids, 120)
    told = 'undercurrent_publisher_renewals_total{kind="process"} 1.0'
    bench.wait(lambda: told in worker.get("/metrics")[1], "the count of it")
    # The rows of this one wait in the ring if need be.
    (last,) = bench.send(["after"], max_tokens=8)
    bench.wait_finals([last], 120)
    one_final_each(bench, [*ids, last])
    assert worker.terminate(60) == 0, worker.tail()
    (attempts,) = [found for (request_id, _), found in bench.activations().items() if request_id == last]
    incarnations = {
        m.incarnation for _, m in bench.messages(bench.plan.activations("residual")) if isinstance(m, PublisherStarted)
    }
    assert len(incarnations) == 2
    assert {message.incarnation for message in attempts} == {max(incarnations)}
    assert [message.seq for message in attempts] == list(range(len(attempts)))
    assert isinstance(attempts[-1], StreamEnded)


def test_the_publisher_dies_with_its_worker(bench):
    worker = bench.start_worker(bench.configure())
    worker.wait_ready()
    children = psutil.Process(worker.pid).children(recursive=True)
    assert any("engine_worker.publisher" in p.cmdline() for p in children)
    worker.kill()
    _, alive = psutil.wait_procs(children, timeout=10.0)
    assert alive == []
