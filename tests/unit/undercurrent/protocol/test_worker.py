"""Single decisions of the engine worker's protocol."""

from __future__ import annotations

from dataclasses import replace

import pytest

from undercurrent.protocol.epochs import Position
from undercurrent.protocol.guards import GuardBook
from undercurrent.protocol.messages import (
    AbortCause,
    Accepted,
    AckOutcome,
    BindingMode,
    BoundProbe,
    CommandKind,
    CommandSource,
    ControlCommand,
    GenerationEvent,
    GenerationKind,
    GuardState,
    Outcome,
    ProbeHeartbeat,
    Released,
    ReleaseReason,
)
from undercurrent.protocol.worker import WorkerCore
from undercurrent.protocol.worker_types import (
    AbortEngine,
    Acknowledge,
    Commit,
    DeadLetter,
    Defect,
    EndStreams,
    HandedOver,
    Now,
    Prompt,
    Publish,
    Reacquire,
    ReadControl,
    RunKey,
    Start,
    Stopped,
    StreamKey,
    Tail,
    Untail,
    WorkerLimits,
)

LIMITS = WorkerLimits(max_in_flight=2, max_waiting=4, handover_s=2.0, shutdown_s=2.0, stream_end_timeout_s=3.0)

_CLAIM = Accepted(
    request_id="r",
    attempt=2,
    engine="dead",
    incarnation=3,
    epoch=2,
    prompt_partition=0,
    prompt_offset=0,
    content_hash=b"h",
    points=("p",),
    stream_partition=0,
    accepted_at_us=0,
)


class Bench:
    """A core that owns the partition of its requests, and a log that it reads."""

    def __init__(self, limits=LIMITS, guards=None):
        self.now_s = 10.0
        self.core = WorkerCore("e", 100, 1, limits, guards)
        self.actions = []
        self.log = []
        self.do(self.core.acquired(0, Position(offset=0, epoch=5, read_from=0), self.now))
        self.do(self.core.caught_up(0, 5, self.now))
        self.take()
        self.sent = 0

    @property
    def now(self):
        return Now(self.now_s, int(self.now_s * 1e6))

    def do(self, actions):
        self.actions += actions

    def take(self, kind=object):
        """Return the actions of a kind since the last call."""
        found, self.actions = [a for a in self.actions if isinstance(a, kind)], []
        return found

    def send(self, request_id, **fields):
        prompt = Prompt(request_id=request_id, offset=self.sent, content_hash=b"h", points=("p",), **fields)
        self.sent += 1
        self.do(self.core.prompt(0, 5, prompt, self.now))
        return prompt

    def write(self, message, epoch=5):
        """Append a record to the log, and let the core read it."""
        self.log.append(message)
        self.do(self.core.generation(0, epoch, len(self.log) - 1, message, self.now))

    def flush(self, epoch=5):
        """Write what the core wants to publish, and what it wants then."""
        while action := next((a for a in self.actions if isinstance(a, Publish)), None):
            self.actions.remove(action)
            self.write(action.message, epoch)

    def start(self, request_id, **fields):
        self.send(request_id, **fields)
        self.flush()
        (start,) = self.take(Start)
        return start.key

    def wait(self, seconds, step_s=0.5):
        end = self.now_s + seconds
        while self.now_s < end:
            self.now_s = min(end, self.now_s + step_s)
            self.do(self.core.tick(self.now))

    def delta(self, key, tokens, reason=None, index=0):
        self.do(self.core.delta(key, index, tokens, reason, self.now))

    def published(self):
        return [action.message for action in self.take(Publish)]


def order(request_id, attempt=None, name="c"):
    return ControlCommand(
        command_id=name,
        kind=CommandKind.ABORT,
        request_id=request_id,
        attempt=attempt,
        source=CommandSource.OPERATOR,
        captured_at_us=1,
        issued_at_us=0,
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
    bench.do(bench.core.streams_lost(key, lost.streams, bench.now))
    assert [message.kind for message in bench.published()] == [GenerationKind.FINAL]


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


def test_an_abort_reaches_the_engine_before_anything_is_written():
    bench = Bench()
    key = bench.start("r")
    bench.delta(key, 7)
    bench.do(bench.core.command(order("r"), bench.now))
    assert bench.take() == [AbortEngine(key)]
    bench.now_s += 0.01
    bench.delta(key, 0, "abort")
    bench.now_s += 0.01
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    (final,) = bench.published()
    assert (final.outcome, final.abort.command_id) == (Outcome.ABORTED, "c")


def test_an_abort_is_acknowledged_with_its_times_once_the_final_is_read():
    bench = Bench()
    key = bench.start("r")
    bench.delta(key, 7)
    bench.do(bench.core.command(order("r"), bench.now))
    bench.do(bench.core.command(order("r", name="second"), bench.now))
    bench.now_s += 0.01
    bench.delta(key, 0, "abort")
    bench.now_s += 0.01
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    assert not [action for action in bench.actions if isinstance(action, Acknowledge)]
    bench.flush()
    first, second = (action.ack for action in bench.take(Acknowledge))
    assert (first.command_id, first.outcome, first.token_index, first.captured_at_us) == ("c", AckOutcome.APPLIED, 7, 1)
    assert first.applied_at_us - first.received_at_us == 10_000
    assert (second.command_id, second.outcome, second.token_index) == ("second", AckOutcome.ALREADY, None)


def test_a_command_that_a_dead_worker_has_carried_out_is_acknowledged_by_the_next():
    bench = Bench()
    bench.write(_CLAIM)
    final = GenerationEvent(
        request_id="r",
        attempt=2,
        engine="dead",
        incarnation=3,
        kind=GenerationKind.FINAL,
        prompt_partition=0,
        prompt_offset=0,
        outcome=Outcome.ABORTED,
        abort=AbortCause(command_id="c", source=CommandSource.OPERATOR),
        generated_tokens=4,
        emitted_at_us=0,
    )
    bench.do(bench.core.command(order("r"), bench.now))
    bench.write(final)
    (ack,) = (action.ack for action in bench.take(Acknowledge))
    assert (ack.outcome, ack.token_index, ack.attempt) == (AckOutcome.APPLIED, 4, 2)


def test_a_lost_worker_promises_nothing():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.command(order("r"), bench.now))
    bench.delta(key, 0, "abort")
    bench.do(bench.core.lost([0], bench.now))
    assert bench.take(Acknowledge) == []


def test_an_abort_that_comes_after_the_last_token_is_too_late_once_the_final_is_read():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.command(order("r"), bench.now))
    bench.delta(key, 1, "length")
    assert bench.take(Acknowledge) == []
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.flush()
    assert [a.ack.outcome for a in bench.take(Acknowledge)] == [AckOutcome.TOO_LATE]
    assert bench.log[-1].outcome is Outcome.COMPLETED


def test_a_position_is_committed_when_the_answers_are_delivered_too():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.command(order("r"), bench.now))
    bench.delta(key, 0, "abort")
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.flush()
    bench.take()
    bench.wait(10)
    assert all(commit.offset == 0 for commit in bench.take(Commit))
    bench.do(bench.core.ack_delivered("c", bench.now))
    bench.wait(10)
    assert [commit.offset for commit in bench.take(Commit)][-1:] == [1]


def test_a_loop_that_stood_still_proves_itself_before_it_claims_or_finishes():
    bench = Bench()
    key = bench.start("r")
    bench.delta(key, 1, "stop")
    bench.do(bench.core.tick(bench.now))
    bench.take()
    bench.now_s += 2.0
    bench.do(bench.core.tick(bench.now))
    assert bench.core.proving
    commits = bench.take()
    assert [type(a) for a in commits if isinstance(a, ReadControl)] == [ReadControl]
    (commit,) = [a for a in commits if isinstance(a, Commit)]
    bench.send("next")
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.do(bench.core.control_at_end(bench.now))
    # A commit from before the pause may have been answered before it, too.
    bench.do(bench.core.committed(0, commit.serial - 1, True, bench.now))
    assert bench.published() == []
    assert bench.core.paused() == {0: "proving"}
    bench.do(bench.core.committed(0, commit.serial, True, bench.now))
    assert sorted(type(message).__name__ for message in bench.published()) == ["Accepted", "GenerationEvent"]


def test_a_revoked_partition_goes_when_its_requests_have_ended():
    bench = Bench()
    key = bench.start("r")
    bench.start("s")
    bench.send("waits")
    bench.do(bench.core.revoked([0], bench.now))
    assert bench.take(HandedOver) == []
    for ending in (key, RunKey("s", 5)):
        bench.delta(ending, 1, "stop")
        bench.do(bench.core.streams_ended(ending, [StreamKey(0, "p")], bench.now))
        bench.flush()
    kinds = [type(a) for a in bench.take()]
    assert kinds[-3:] == [Commit, Untail, HandedOver]
    assert not any(isinstance(m, Released) for m in bench.log)


def test_what_is_still_running_after_the_handover_time_is_stopped_and_released():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.revoked([0], bench.now))
    bench.take()
    bench.wait(2.0)
    actions = bench.take()
    assert AbortEngine(key) in actions
    (released,) = [a.message for a in actions if isinstance(a, Publish)]
    assert (released.attempt, released.reason) == (5, ReleaseReason.HANDED_OVER)
    assert HandedOver(0) in actions


def test_a_lost_partition_is_given_up_at_once():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.lost([0], bench.now))
    actions = bench.take()
    assert actions[0] == AbortEngine(key)
    assert actions[1].message.reason is ReleaseReason.LOST_PARTITION
    assert not bench.core.holds(key)


def test_a_stop_is_complete_when_nothing_is_in_flight():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.stop(bench.now))
    assert bench.take(Stopped) == []
    bench.delta(key, 1, "stop")
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.flush()
    assert bench.take(Stopped) == [Stopped()]


def test_a_claim_of_a_higher_epoch_by_another_worker_makes_it_take_the_partition_anew():
    bench = Bench()
    key = bench.start("r")
    claim = replace(bench.log[0], attempt=8, incarnation=7, engine="other", epoch=8)
    bench.write(claim)
    actions = bench.take()
    assert AbortEngine(key) in actions
    assert Reacquire(0, 9) in actions


def test_a_claim_of_a_lower_epoch_is_outbid():
    bench = Bench()
    key = bench.start("r")
    bench.write(replace(bench.log[0], attempt=8, incarnation=7, engine="zombie", epoch=4))
    actions = bench.take()
    assert AbortEngine(key) in actions
    assert [a.message.attempt for a in actions if isinstance(a, Publish)] == [9]


def test_the_streams_of_a_dead_worker_end_as_lost_when_its_request_does_not_run_again():
    bench = Bench()
    bench.write(_CLAIM)
    bench.do(bench.core.command(order("r"), bench.now))
    bench.send("r")
    bench.flush()
    (lost,) = bench.take(EndStreams)
    assert (lost.holder.engine, lost.holder.attempt, lost.streams) == ("dead", 2, (StreamKey(0, "p"),))
    bench.do(bench.core.streams_lost(lost.key, lost.streams, bench.now))
    (final,) = bench.published()
    assert (final.attempt, final.outcome) == (5, Outcome.ABORTED)


@pytest.mark.parametrize(("waited_s", "state"), [(0.4, None), (1.1, GuardState.BEHIND)])
def test_a_final_waits_a_while_for_a_guard_that_lives(waited_s, state):
    bench = Bench(guards=GuardBook(("g",), absent_after_s=60.0))
    bound = BoundProbe(probe="g", point="p", mode=BindingMode.ABORT)
    bench.core.heartbeat(
        ProbeHeartbeat(service="s", member="m", probes=(bound,), partitions=(), sent_at_us=0), bench.now
    )
    key = bench.start("r")
    bench.delta(key, 1, "stop")
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.wait(waited_s)
    assert [message.guards[0].state for message in bench.published()] == ([] if state is None else [state])


def test_what_was_under_way_for_an_earlier_ownership_is_nothing():
    bench = Bench()
    bench.do(bench.core.acquired(0, Position(offset=0, epoch=6, read_from=0), bench.now))
    assert [tail.epoch for tail in bench.take(Tail)] == [6]
    bench.do(bench.core.caught_up(0, 6, bench.now))
    bench.send("r")  # under epoch 5
    assert bench.published() == []
    assert bench.core.waiting == 0
