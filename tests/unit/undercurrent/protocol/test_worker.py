"""Prompts, claims and finals in the engine worker's protocol."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.undercurrent.protocol.worker_bench import LIMITS, Bench
from undercurrent.protocol.epochs import Position
from undercurrent.protocol.guarding import GuardRules
from undercurrent.protocol.guards import GuardBook
from undercurrent.protocol.messages import (
    Accepted,
    BindingMode,
    BoundProbe,
    GenerationEvent,
    GenerationKind,
    GuardState,
    Outcome,
    ProbeHeartbeat,
)
from undercurrent.protocol.worker_partition import Finished
from undercurrent.protocol.worker_types import (
    DeadLetter,
    Defect,
    EndStreams,
    Prompt,
    RunKey,
    Start,
    StreamKey,
)


def test_a_prompt_reaches_the_engine_only_when_its_claim_was_read_back():
    bench = Bench()
    bench.send("r")
    (claim,) = bench.published()
    assert isinstance(claim, Accepted)
    assert (claim.attempt, claim.incarnation, claim.epoch, claim.points) == (5, 100, 5, ("p",))
    assert bench.take(Start) == []
    bench.write(claim)
    assert [start.key for start in bench.take(Start)] == [RunKey("r", 5)]


def test_the_final_waits_for_the_ends_of_the_streams():
    bench = Bench()
    key = bench.start("r")
    bench.delta(key, 3)
    bench.delta(key, 1, "stop")
    assert bench.published() == []
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    (final,) = bench.published()
    assert (final.outcome, final.finish_reason, final.generated_tokens) == (Outcome.COMPLETED, "stop", 4)


def test_a_stream_without_an_end_is_declared_lost_and_only_then_the_final_is_written():
    bench = Bench()
    key = bench.start("r")
    bench.delta(key, 1, "stop")
    bench.wait(2.9)
    assert bench.take(EndStreams) == []
    bench.wait(0.2)
    (lost,) = bench.take(EndStreams)
    assert (lost.streams, lost.holder.attempt) == ((StreamKey(0, "p"),), 5)
    bench.wait(30)
    assert bench.published() == []
    bench.do(bench.core.streams_lost(lost, bench.now))
    assert [message.kind for message in bench.published()] == [GenerationKind.FINAL]


def test_an_end_that_the_publisher_still_has_is_waited_for_however_long_brokers_are_away():
    bench = Bench()
    key = bench.start("r")
    bench.delta(key, 1, "stop")
    stopped_s = bench.now_s
    for _ in range(60):
        bench.core.published(stopped_s - 0.1, bench.now)
        bench.wait(1.0)
    assert bench.take(EndStreams) == []
    bench.core.published(bench.now_s, bench.now)
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    assert [message.kind for message in bench.published()] == [GenerationKind.FINAL]
    assert bench.take(EndStreams) == []


@pytest.mark.parametrize("reports", [True, False])
def test_an_end_that_the_publisher_does_not_have_or_took_along_is_declared_lost(reports):
    bench = Bench()
    key = bench.start("r")
    bench.core.published(0.0, bench.now)
    bench.delta(key, 1, "stop")
    waited_s = 0.0
    while not (lost := bench.take(EndStreams)):
        bench.wait(0.5)
        waited_s += 0.5
        if reports:
            bench.core.published(bench.now_s, bench.now)
        assert waited_s < 10.0
    # By then nobody reports any more, or nothing of it is left to be written.
    assert waited_s >= (3.0 if reports else 5.0)
    assert lost[0].streams == (StreamKey(0, "p"),)


def test_no_more_run_at_once_than_the_engine_has_slots_and_partitions_pause():
    bench = Bench()
    for number in range(6):
        bench.send(f"r{number}")
    assert len(bench.published()) == 2
    assert bench.core.paused() == {0: "backlog"}
    assert (bench.core.running, bench.core.waiting) == (2, 4)


def test_intake_resumes_when_half_of_the_backlog_has_gone():
    bench = Bench()
    for number in range(6):
        bench.send(f"r{number}")
    seen = []
    while bench.core.waiting:
        bench.flush()
        seen.append((bench.core.waiting, bench.core.paused()[0]))
        for start in bench.take(Start):
            bench.delta(start.key, 1, "stop")
    assert seen == [(4, "backlog"), (2, "backlog")]
    assert bench.core.paused() == {0: None}


def test_a_prompt_is_not_the_duplicate_of_its_own_duplicate():
    bench = Bench()
    # An owner before has answered the second prompt; the first one is still to be run.
    start = Position(offset=0, epoch=6, read_from=0, finished=frozenset({3}))
    bench.do(bench.core.acquired(0, start, bench.now))
    bench.do(bench.core.caught_up(0, 6, bench.now))
    for offset, request_id in enumerate(["a", "b", "twice", "twice"]):
        prompt = Prompt(request_id=request_id, offset=offset, content_hash=b"h", points=("p",))
        bench.do(bench.core.prompt(0, 6, prompt, bench.now))
    bench.flush(epoch=6)
    for action in bench.take(Start):
        bench.delta(action.key, 1, "stop")
    bench.flush(epoch=6)
    assert [action.key.request_id for action in bench.take(Start)] == ["twice"]


@pytest.mark.parametrize(("content_hash", "kind"), [(b"h", "duplicate"), (b"other", "refused")])
def test_a_second_prompt_of_an_id_is_answered_once_the_first_is_known(content_hash, kind):
    bench = Bench()
    bench.start("r")
    again = Prompt(request_id="r", offset=1, content_hash=content_hash, points=("p",))
    bench.do(bench.core.prompt(0, 5, again, bench.now))
    (answer,) = bench.published()
    assert (answer.kind.value, answer.prompt_offset, answer.attempt) == (kind, 1, 5)
    assert bench.core.unsettled == 1


def test_a_finished_prompt_is_remembered_for_a_window_of_time_and_not_for_ever():
    bench = Bench(replace(LIMITS, dedupe_window_s=60.0))
    past = {name: Finished(number, b"h") for number, name in enumerate(["a", "b"])}
    bench.do(bench.core.acquired(0, Position(offset=2, epoch=6, read_from=0), bench.now, past))
    bench.do(bench.core.caught_up(0, 6, bench.now))

    def again(request_id, offset):
        prompt = Prompt(request_id=request_id, offset=offset, content_hash=b"h", points=("p",))
        bench.do(bench.core.prompt(0, 6, prompt, bench.now))
        return [type(message).__name__ for message in bench.published()]

    bench.wait(70)
    assert again("a", 2) == ["GenerationEvent"]
    bench.wait(60)
    assert again("b", 3) == ["Accepted"]


def test_a_prompt_past_its_deadline_fails_without_running():
    bench = Bench()
    bench.start("a")
    bench.start("b")
    bench.send("late", deadline_us=bench.now.wall_us + 1_000_000)
    bench.wait(2.0)
    bench.flush()
    finals = [m for m in bench.log if isinstance(m, GenerationEvent)]
    assert [(m.request_id, m.outcome, m.finish_reason) for m in finals] == [("late", Outcome.FAILED, "deadline")]


def test_a_defect_is_dead_lettered_before_its_final():
    bench = Bench()
    bench.send("r", defect=Defect(kind="bad_request", error="unknown point"))
    bench.flush()
    (letter,) = bench.take(DeadLetter)
    assert letter.offset == 0
    assert bench.published() == []
    bench.do(bench.core.dead_lettered(0, 0, bench.now))
    (final,) = bench.published()
    assert (final.outcome, final.finish_reason, final.error) == (Outcome.FAILED, "bad_request", "unknown point")


@pytest.mark.parametrize(("waited_s", "state"), [(0.4, None), (1.1, GuardState.BEHIND)])
def test_a_final_waits_a_while_for_a_guard_that_lives(waited_s, state):
    bench = Bench(guards=GuardBook(GuardRules(probes=("g",), absent_after_s=60.0)))
    bound = BoundProbe(probe="g", point="p", mode=BindingMode.ABORT)
    bench.core.heartbeat(
        ProbeHeartbeat(service="s", member="m", probes=(bound,), partitions=(0,), sent_at_us=0), bench.now
    )
    key = bench.start("r")
    bench.delta(key, 1, "stop")
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.wait(waited_s)
    assert [message.guards[0].state for message in bench.published()] == ([] if state is None else [state])
