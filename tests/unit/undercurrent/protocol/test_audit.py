"""An audit finds every fault that is planted in a healthy record, and nothing in a healthy one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.undercurrent.protocol.record_world import POINT, RecordWorld, guarded, is_final, lost
from undercurrent.protocol.audit import Audit, FindingKind
from undercurrent.protocol.messages import (
    Accepted,
    AckOutcome,
    ActivationBlock,
    EndReason,
    GenerationKind,
    ProbeHeartbeat,
    ProbeVerdict,
    PublisherStarted,
    StreamEnded,
)
from undercurrent.testing.streams import StreamBuilder


@pytest.fixture
def world():
    return RecordWorld()


# --- nothing is wrong


def test_a_healthy_record_has_no_findings_and_is_forgotten(world):
    for number in range(50):
        world.completed(f"r{number}", guards=guarded())
        world.handed_over(f"h{number}", duplicate=True)
    audit = world.audit()
    assert list(audit.findings()) == []
    assert len(audit) == 0
    assert len(audit._streams) == len(audit._streams._rows) == len(audit._reader) == len(audit._settled_early) == 0
    # All of them are kept as the few shapes that there are.
    assert len(audit._kept) == 2
    assert (audit.counts.prompts, audit.counts.over, audit.counts.streams, audit.counts.void) == (150, 100, 150, 50)


def test_aborts_poison_and_refused_prompts_are_in_order(world):
    world.aborted("a")
    world.poison("p")
    offset = world.completed("r")
    world.event("r", world.prompt("r", tenant="other"), GenerationKind.REFUSED)
    world.command("r", "late")
    world.ack("r", AckOutcome.TOO_LATE, "late")
    assert offset == 0 or world.home("r") == world.home("p")
    assert world.kinds() == []


def test_what_a_closed_request_hears_of_later_is_in_order(world):
    world.completed("r")
    world.verdict("r", service="another")
    world.command("r")
    world.ack("r", AckOutcome.TOO_LATE)
    assert world.kinds() == []


def test_a_stream_of_several_shards_is_joined_without_its_values(world):
    offset = world.prompt("r")
    world.accept("r", offset)
    shards = [
        StreamBuilder("r", engine="e", incarnation=1, shard=shard, shards=2, layers=(shard,)) for shard in range(2)
    ]
    for shard in shards:
        world.activation("r", shard.started())
    for position in range(3):
        for shard in shards:
            world.activation("r", shard.activations([position], [[0.0] * 4]))
    for shard in shards:
        world.activation("r", shard.ended())
    world.verdict("r")
    world.tokens("r", offset)
    world.final("r", offset)
    assert world.kinds() == []


def test_a_server_without_prompts_is_judged_by_its_streams(world):
    world.stream("http-1")
    assert world.kinds() == []
    stream = world.open_stream("http-2")
    world.activation("http-2", stream.ended())
    assert world.kinds() == ["no_verdict"]


def test_what_began_before_the_part_that_is_read_is_not_judged(world):
    world.completed("old")
    world.completed("new")
    for name in ("prompts", "generations"):
        world.logs[f"t.{name}", world.home("old")] = [
            heard for heard in world.logs[f"t.{name}", world.home("old")] if heard.key != "old"
        ]
    log = world.logs[f"t.activations.{POINT}", world.home("old")]
    del log[0]  # the start of the old request's stream
    assert world.kinds(whole=False) == []


def test_what_may_still_be_under_way_is_left_out(world):
    world.completed("r")
    at_ms = max(heard.at_ms for heard in world.in_order())
    world.accept("slow", world.prompt("slow"))
    audit = world.audit()
    assert list(audit.findings(at_ms)) == []
    assert audit.under_way(at_ms) == 1
    assert [finding.kind for finding in audit.findings(at_ms + 2)] == [FindingKind.NO_FINAL]


# --- faults


def test_a_request_without_a_final_says_who_has_it(world):
    world.accept("held", world.prompt("held"))
    offset = world.prompt("given")
    world.accept("given", offset)
    world.release("given", offset)
    world.prompt("waiting")
    found = {finding.request_id: finding for finding in world.findings()}
    assert {finding.kind for finding in found.values()} == {FindingKind.NO_FINAL}
    assert "attempt 1 of e holds it" in found["held"].detail
    assert "gave it up" in found["given"].detail
    assert "no engine worker has accepted it" in found["waiting"].detail


def test_one_child_without_a_final_is_found(world):
    offset = world.prompt("r")
    world.accept("r", offset, n=2, points=())
    world.tokens("r", offset)
    world.final("r", offset)
    (found,) = world.findings()
    assert (found.kind, "child 1" in found.detail) == (FindingKind.NO_FINAL, True)


def test_a_zombies_final_is_not_the_final(world):
    offset = world.prompt("r")
    world.accept("r", offset)
    world.accept("r", offset, 2)
    world.final("r", offset, 1)
    assert world.kinds() == ["no_final"]


def test_a_repeated_prompt_that_nobody_answers_is_found(world):
    world.completed("r")
    world.prompt("r")
    assert world.kinds() == ["prompt_unanswered"]


@pytest.mark.parametrize("late", [False, True])
def test_a_second_final_of_the_holder_is_found(world, late):
    offset = world.completed("r")
    if late:
        world.completed("another")
    world.final("r", offset)
    assert world.kinds() == ["double_final"]


def test_a_missing_token_and_a_wrong_count_are_found(world):
    world.completed("count", tokens=3)
    world.completed("gap")
    world.change(
        "generations",
        lambda m: getattr(m, "kind", None) is GenerationKind.TOKENS and m.request_id == "gap",
        lambda m: None,
    )
    assert world.kinds() == ["tokens_broken"] * 2


def test_a_run_without_a_claim_is_found(world):
    world.completed("r")
    world.stream("r", 2)
    assert world.kinds() == ["ran_unclaimed"]


def test_a_completed_request_without_a_stream_is_found_unless_that_is_declared(world):
    for request_id in ("declared", "silent"):
        offset = world.prompt(request_id)
        world.accept(request_id, offset)
        world.tokens(request_id, offset)
        world.final(request_id, offset)
    world.activation("declared", lost(StreamBuilder("declared", engine="e").ended()))
    (found,) = world.findings()
    assert (found.kind, found.request_id, found.point) == (FindingKind.STREAM_MISSING, "silent", POINT)


def test_a_stream_that_outlives_its_request_is_found(world):
    world.completed("r")
    world.open_stream("r")  # a frozen publisher thaws
    assert world.kinds() == ["stream_open"]
    world.activation("r", PublisherStarted(engine="e", incarnation=9, started_at_us=0))
    world.verdict("r", complete=False)  # the host's second word: the stream was opened twice
    assert world.kinds() == ["double_verdict"]


def test_two_engines_on_one_stream_are_found_and_the_stranger_is_dead_lettered(world):
    offset = world.prompt("r")
    world.accept("r", offset)
    stream = world.open_stream("r")
    other = StreamBuilder("r", engine="other")
    stray = world.activation("r", other.started())
    world.letter(f"activations.{POINT}", world.home("r"), stray)
    world.activation("r", stream.ended())
    world.verdict("r", complete=False, end_reason="conflict")
    world.tokens("r", offset)
    world.final("r", offset)
    assert world.kinds() == ["stream_conflict"]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_record_that_vanishes_is_an_undeclared_gap_and_makes_a_complete_result_false(world, at):
    world.completed("r")
    world.change(
        f"activations.{POINT}",
        lambda m: isinstance(m, ActivationBlock) and m.seq == at + 1,
        lambda m: None,
    )
    assert world.kinds() == ["undeclared_gap", "false_complete"]


def test_a_declared_drop_is_no_finding_but_a_complete_result_on_it_is(world):
    offset = world.prompt("r")
    world.accept("r", offset)
    stream = world.open_stream("r")
    stream.skip(2)
    world.activation("r", stream.ended(dropped=2))
    world.tokens("r", offset)
    world.final("r", offset)
    world.verdict("r", complete=False, missing=2)
    assert world.kinds() == []
    world.change("verdicts", lambda m: True, lambda m: replace(m, complete=True))
    assert world.kinds() == ["false_complete"]


def test_numbers_that_nobody_declares_are_an_undeclared_gap(world):
    offset = world.prompt("r")
    world.accept("r", offset)
    stream = world.open_stream("r")
    stream.skip()
    world.activation("r", stream.ended())
    world.verdict("r", complete=False)
    world.tokens("r", offset)
    world.final("r", offset)
    assert world.kinds() == ["undeclared_gap"]


def test_a_publisher_that_gives_up_is_held_to_what_it_says_it_wrote(world):
    offset = world.prompt("r")
    world.accept("r", offset)
    stream = world.open_stream("r")
    world.activation("r", replace(stream.ended(), reason=EndReason.LOST, emitted=(5,)))
    world.verdict("r", complete=False, end_reason="lost")
    world.tokens("r", offset)
    world.final("r", offset)
    assert world.kinds() == ["undeclared_gap"]


@pytest.mark.parametrize(
    "topic", ["prompts", f"activations.{POINT}", "generations", "control", "control.acks", "verdicts"]
)
def test_bytes_that_nobody_can_read_have_to_be_dead_lettered(world, topic):
    offset = world.add(topic, 1, "", None)
    assert "not_dead_lettered" in world.kinds()
    for _ in range(2):  # two services may read one topic
        world.letter(topic, 1, offset)
        assert world.kinds() == []


def test_a_message_on_a_topic_that_does_not_take_it_has_to_be_dead_lettered(world):
    world.add("generations", 1, "r", ProbeHeartbeat(service="s", member="m", probes=(), partitions=(), sent_at_us=1))
    assert world.kinds() == ["not_dead_lettered"]
    world.add("verdicts", 1, "r", ProbeHeartbeat(service="s", member="m", probes=(), partitions=(), sent_at_us=1))
    world.add("labels", 1, "r", None)  # takes a label back
    assert world.kinds() == ["not_dead_lettered"]


def test_a_repeat_that_nobody_can_read_is_answered_and_has_no_dead_letter(world):
    world.poison("p")
    again = world.add("prompts", world.home("p"), "p", None)
    assert sorted(world.kinds()) == ["not_dead_lettered", "prompt_unanswered"]
    world.event("p", again, GenerationKind.DUPLICATE)
    assert world.kinds() == []


def test_a_stray_record_has_to_be_dead_lettered_where_its_stream_cannot_have_begun_before(world):
    world.activation("r", StreamBuilder("r").activations([0], [[0.0] * 4]))
    assert world.kinds() == ["not_dead_lettered"]
    assert world.kinds(whole=False) == []


def test_a_prompt_under_another_key_is_settled_by_its_dead_letter(world):
    world.completed("r")
    misplaced = world.prompt("r")
    log = world.logs["t.prompts", world.home("r")]
    log[misplaced] = log[misplaced]._replace(key="other")
    assert world.kinds() == ["no_final"]
    world.letter("prompts", world.home("r"), misplaced)
    assert world.kinds() == []


def test_a_dead_letter_is_no_final_of_a_prompt_that_was_claimed(world):
    world.poison("p")
    world.change("generations", is_final, lambda m: None)
    assert world.kinds() == ["no_final"]


def test_a_guard_is_complete_only_where_the_stream_was_finished(world):
    world.completed("r", guards=guarded())
    assert world.kinds() == []
    world.change("verdicts", lambda m: True, lambda m: replace(m, end_reason="capture_error"))
    assert world.kinds() == ["guard_unfounded"]


def test_a_request_that_is_wrong_for_ever_does_not_grow_for_ever(world):
    offset = world.completed("r")
    for _ in range(500):
        world.final("r", offset)
    assert len(world.findings()) == 16


# --- whatever the order between partitions

FAULTS = {
    "none": lambda world: None,
    "final": lambda world: world.change("generations", is_final, lambda m: None),
    "claim": lambda world: world.change("generations", lambda m: isinstance(m, Accepted), lambda m: None),
    "verdict": lambda world: world.change("verdicts", lambda m: isinstance(m, ProbeVerdict), lambda m: None),
    "end": lambda world: world.change(f"activations.{POINT}", lambda m: isinstance(m, StreamEnded), lambda m: None),
    "ack": lambda world: world.change("control.acks", lambda m: True, lambda m: None),
    "twice": lambda world: world.verdict("r0"),
    "zombie": lambda world: world.final("h0", 0, 3),
}


@settings(max_examples=60)
@given(data=st.data(), fault=st.sampled_from(sorted(FAULTS)))
def test_the_order_between_partitions_does_not_matter(data, fault):
    world = RecordWorld()
    for number in range(2):
        world.completed(f"r{number}", guards=guarded())
        world.handed_over(f"h{number}", duplicate=True)
        world.aborted(f"a{number}", f"c{number}")
        world.poison(f"p{number}")
        again = world.add("prompts", world.home(f"p{number}"), f"p{number}", None)
        world.event(f"p{number}", again, GenerationKind.DUPLICATE)
    FAULTS[fault](world)
    expected = world.findings()
    assert bool(expected) == (fault != "none")
    left = {name: list(log) for name, log in world.logs.items() if log}
    audit = Audit("t", whole=True)
    while left:
        name = data.draw(st.sampled_from(sorted(left)))
        log = left[name]
        count = data.draw(st.integers(1, len(log)))
        for heard in log[:count]:
            audit.take(heard)
        left[name] = log[count:]
        if not left[name]:
            del left[name]
    assert list(audit.findings()) == expected
    if fault == "none":
        # Only what was stopped or failed is kept in full: its final says more than that all was well.
        assert len(audit) == 4


# --- probes that join points
