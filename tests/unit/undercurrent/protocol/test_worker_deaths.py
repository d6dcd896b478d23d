"""Prompts that engines do not survive: alone from the second death on, given up at the third."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit import messages
from tests.unit.undercurrent.protocol.worker_bench import Bench
from undercurrent.protocol.epochs import Position, decode_metadata
from undercurrent.protocol.messages import Accepted, GenerationKind, Outcome, Released, ReleaseReason
from undercurrent.protocol.worker_types import Commit, DeadLetter, EndStreams, RunKey, Start, StreamKey

FINAL = GenerationKind.FINAL


def claim(request_id: str, number: int, offset: int = 0) -> Accepted:
    """Return the claim of the worker that is the nth to take a request."""
    return messages.accepted(
        request_id=request_id,
        attempt=number,
        engine=f"e{number}",
        incarnation=number,
        epoch=number,
        prompt_offset=offset,
        content_hash=b"h",
        points=("p",),
    )


def released(request_id: str, number: int) -> Released:
    return Released(
        request_id=request_id,
        attempt=number,
        engine=f"e{number}",
        incarnation=number,
        prompt_partition=0,
        prompt_offset=0,
        reason=ReleaseReason.SHUTDOWN,
        released_at_us=0,
    )


def died(bench: Bench, request_id: str, times: int, offset: int = 0) -> None:
    for number in range(1, times + 1):
        bench.write(claim(request_id, number, offset))


def started(bench: Bench) -> list[str]:
    bench.flush()
    return [start.key.request_id for start in bench.take(Start)]


def end(bench: Bench, request_id: str) -> list[str]:
    """Let a request complete; return what starts then."""
    key = RunKey(request_id, 5)
    bench.delta(key, 1, "stop")
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    return started(bench)


def test_a_prompt_that_two_engines_have_not_survived_runs_alone() -> None:
    bench = Bench()
    died(bench, "suspect", 2, offset=1)
    for name in ("before", "suspect", "after"):
        bench.send(name)
    assert started(bench) == ["before"]
    assert bench.core.alone is None
    assert end(bench, "before") == ["suspect"]
    assert bench.core.alone == RunKey("suspect", 5)
    assert end(bench, "suspect") == ["after"]
    assert bench.core.alone is None


def test_nobody_is_begun_before_the_last_ones_end_is_certain() -> None:
    bench = Bench()
    died(bench, "suspect", 2, offset=1)
    for name in ("before", "suspect", "after"):
        bench.send(name)
    assert started(bench) == ["before"]
    for name, following in (("before", "suspect"), ("suspect", "after")):
        key = RunKey(name, 5)
        bench.delta(key, 1, "stop")
        bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
        (final,) = bench.published()
        assert final.outcome is Outcome.COMPLETED
        bench.write(final)
        assert started(bench) == [following]


def test_one_death_says_nothing() -> None:
    bench = Bench()
    died(bench, "r", 1)
    bench.send("r")
    bench.send("s")
    assert started(bench) == ["r", "s"]


def test_after_the_third_death_a_prompt_is_a_dead_letter_and_failed() -> None:
    bench = Bench()
    died(bench, "r", 3)
    bench.send("r")
    bench.send("s")
    bench.flush()
    actions = bench.take()
    assert [a.key.request_id for a in actions if isinstance(a, Start)] == ["s"]
    (letter,) = [a for a in actions if isinstance(a, DeadLetter)]
    assert (letter.kind, letter.offset) == ("engine_lost", 0)
    assert "3 engines ended" in letter.error
    assert "attempts 1, 2, 3" in letter.error
    # Whose streams they were is known from their claims, of every one of them.
    lost = [a for a in actions if isinstance(a, EndStreams)]
    assert [(a.holder.engine, a.holder.attempt, a.streams) for a in lost] == [
        (f"e{number}", number, (StreamKey(0, "p"),)) for number in (1, 2, 3)
    ]
    for action in lost[:2]:
        bench.do(bench.core.streams_lost(action, bench.now))
    bench.do(bench.core.dead_lettered(0, 0, bench.now))
    assert bench.published() == []
    bench.do(bench.core.streams_lost(lost[2], bench.now))
    (final,) = bench.published()
    assert (final.outcome, final.finish_reason, final.error) == (Outcome.FAILED, "engine_lost", letter.error)


@pytest.mark.parametrize("last_word", ["released", "final"])
def test_who_gave_a_prompt_up_or_ended_it_in_vain_did_not_die_of_it(last_word: str) -> None:
    bench = Bench()
    died(bench, "r", 3)
    final = messages.event(request_id="r", attempt=2, incarnation=2, kind=FINAL, outcome=Outcome.COMPLETED)
    bench.write(released("r", 2) if last_word == "released" else final)
    bench.write(released("r", 1))
    bench.send("r")
    bench.send("s")
    assert started(bench) == ["r", "s"]


def test_a_worker_has_not_died_of_what_it_claims_again_and_says_so() -> None:
    bench = Bench()
    bench.send("r")
    bench.flush()
    for number in (6, 8, 10):
        bench.write(messages.accepted(request_id="r", attempt=number, incarnation=7, epoch=4))
        bench.write(replace(released("r", number), incarnation=7))
        bench.flush()
    state = bench.core._owned[0].reader.get("r")
    assert state is not None
    assert state.unexplained == [state.holder]
    assert bench.core.alone is None


def test_a_death_that_is_read_between_claim_and_start_counts() -> None:
    bench = Bench()
    died(bench, "r", 1)
    bench.send("r")
    bench.send("s")
    first, second = bench.published()
    bench.write(claim("r", 4))
    bench.write(first)
    bench.write(second)
    assert started(bench) == ["s"]
    assert end(bench, "s") == ["r"]
    assert bench.core.alone is not None


def test_deaths_are_known_where_the_log_has_forgotten_them() -> None:
    bench = Bench()
    before = Position(offset=0, epoch=7, read_from=0, unexplained={1: 2})
    bench.do(bench.core.acquired(0, before, bench.now))
    bench.do(bench.core.caught_up(0, 7, bench.now))
    commit = bench.take(Commit)[-1]
    assert decode_metadata(commit.offset, commit.metadata).unexplained == {1: 2}
    for name in ("first", "suspect"):
        prompt = bench.send(name)
        bench.do(bench.core.prompt(0, 7, prompt, bench.now))
    bench.flush(7)
    assert [start.key.request_id for start in bench.take(Start)] == ["first"]
