"""An API server stops and answers for its own requests, and for nobody else's."""

from __future__ import annotations

from engine_worker.server_desk import Decision, ServerDesk, ServerRequest
from undercurrent.protocol.brake import Brake, BrakeLimits
from undercurrent.protocol.control import ControlBook
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.protocol.messages import (
    AckOutcome,
    CommandKind,
    CommandSource,
    ControlAck,
    ControlCommand,
    Rollout,
    RolloutChange,
)


def command(command_id, request_id, attempt=None, index=None, probe=None, source=CommandSource.PROBE):
    return ControlCommand(
        command_id=command_id, kind=CommandKind.ABORT, request_id=request_id, attempt=attempt, index=index,
        source=source, probe=probe, issued_at_us=1,
    )  # fmt: skip


class World:
    """A desk, and an engine that is a table of token counts."""

    def __init__(self, most=100, brake=None, holdout=None):
        self.book, self.tokens = ControlBook(10**12), {}
        self.desk = ServerDesk(self.book, self.tokens.get, brake=brake, holdout=holdout, most=most)

    def runs(self, engine_id, tokens=3, **names):
        self.tokens[engine_id] = tokens
        request = ServerRequest(engine_id=engine_id, names={engine_id: (1, 0), **names})
        return request, self.desk.added(request)

    def says(self, *args, **fields):
        noted = self.book.add(command(*args, **fields), 5)
        return None if noted is None else self.desk.decide(noted)


def test_a_running_request_is_stopped_and_the_command_applied():
    world = World()
    request, _ = world.runs("a")
    assert world.says("c", "a", attempt=1, index=0) == Decision((request,), AckOutcome.APPLIED, 1, 3)
    assert request.aborted_by == "c"


def test_a_request_of_nobody_here_is_left_to_others():
    world = World()
    world.runs("a")
    assert world.says("c", "b") == Decision()


def test_a_request_that_has_ended_is_too_late_to_stop():
    world = World()
    world.runs("a")
    del world.tokens["a"]
    assert world.says("c", "a") == Decision(outcome=AckOutcome.TOO_LATE, attempt=1)


def test_a_second_command_finds_it_stopped_already_even_before_the_engine_has_stopped_it():
    world = World()
    world.runs("a")
    world.says("c", "a")
    assert world.says("d", "a") == Decision(outcome=AckOutcome.ALREADY, attempt=1)
    del world.tokens["a"]
    assert world.says("e", "a") == Decision(outcome=AckOutcome.ALREADY, attempt=1)


def test_a_probes_command_meets_its_own_attempt_alone():
    world = World()
    first, _ = world.runs("a1", mine=(10, 0))
    second, _ = world.runs("a2", mine=(20, 0))
    assert world.says("c", "mine", attempt=10).abort == (first,)
    assert world.says("d", "mine", attempt=15) == Decision(outcome=AckOutcome.STALE, attempt=20)
    assert world.says("e", "mine", attempt=30) == Decision(), "it may still come, or is elsewhere"
    assert world.says("f", "mine", attempt=20).abort == (second,)


def test_an_operators_command_meets_every_attempt():
    world = World()
    requests = [world.runs(f"a{n}", tokens=n, mine=(n, 0))[0] for n in (1, 2)]
    assert world.says("c", "mine") == Decision(tuple(requests), AckOutcome.APPLIED, 2, 2)


def test_a_command_for_one_child_leaves_the_others():
    world = World()
    world.runs("0_a", mine=(1, 0))
    child, _ = world.runs("1_a", mine=(1, 1))
    assert world.says("c", "mine", attempt=1, index=1).abort == (child,)


def test_the_id_that_the_client_was_answered_with_needs_no_attempt_and_takes_none():
    world = World()
    request, _ = world.runs("cmpl-a-0-12345678", **{"cmpl-a-0": None})
    assert world.says("c", "cmpl-a-0", attempt=1, index=0) == Decision()
    decided = world.says("d", "cmpl-a-0")
    assert (decided.abort, decided.outcome, decided.attempt) == ((request,), AckOutcome.APPLIED, None)


def test_a_command_that_came_first_stops_the_request_when_it_comes():
    world = World()
    assert world.says("c", "mine") == Decision()
    _, (binding,) = world.runs("a", tokens=0, mine=(7, 0))
    assert binding.message.command_id == "c"
    assert world.desk.decide(binding).outcome is AckOutcome.APPLIED


def test_a_command_that_somebody_has_answered_stops_nothing_that_comes_later():
    world = World()
    world.says("c", "mine")
    answered = ControlAck(
        command_id="c", request_id="mine", engine="other", incarnation=1, outcome=AckOutcome.APPLIED, received_at_us=1
    )
    world.book.answered(answered, 2)
    assert world.runs("a", mine=(7, 0))[1] == []


def test_a_probes_command_for_another_attempt_does_not_stop_the_one_that_comes():
    world = World()
    world.says("c", "mine", attempt=6)
    assert world.runs("a", mine=(7, 0))[1] == []


def stop(world, request_id, probe="mad"):
    return world.says(f"{probe} stops {request_id}", request_id, attempt=1, probe=probe)


def test_a_probe_that_stops_too_many_of_the_last_requests_is_braked_and_an_operator_is_not():
    brake = Brake(BrakeLimits(max_abort_share=0.3, window=10, min_requests=10))
    world = World(brake=brake)
    requests = {f"a{n}": world.runs(f"a{n}")[0] for n in range(10)}
    assert [stop(world, f"a{n}").outcome for n in range(3)] == [AckOutcome.APPLIED] * 3
    assert stop(world, "a3") == Decision(outcome=AckOutcome.BRAKED, attempt=1)
    assert requests["a3"].aborted_by is None
    assert stop(world, "a4", probe="other").outcome is AckOutcome.APPLIED
    assert world.says("o", "a3", source=CommandSource.OPERATOR).abort == (requests["a3"],)
    # What came first does not matter, nor whether it had begun: only that it is resumed.
    world.says("early", "mine", attempt=1, probe="mad")
    _, (waited,) = world.runs("b", mine=(1, 0))
    assert world.desk.decide(waited).outcome is AckOutcome.BRAKED
    brake.rollout(0, Rollout(probe="mad", sequence=1, entry_id="e", change=RolloutChange.RESUME, created_at_us=0))
    assert stop(world, "a5").outcome is AckOutcome.APPLIED


def test_the_brake_looks_back_at_the_last_requests_alone():
    world = World(brake=Brake(BrakeLimits(max_abort_share=0.5, window=2, min_requests=2)))
    outcomes = []
    for number in range(6):
        world.runs(f"a{number}")
        if number % 2:
            outcomes.append(stop(world, f"a{number}").outcome)
    assert outcomes == [AckOutcome.APPLIED] * 3


def test_no_probe_stops_a_request_that_is_held_out_and_an_operator_does():
    rule = HoldoutRule(share=0.5)
    world = World(holdout=rule, brake=Brake(BrakeLimits(max_abort_share=0.5, window=40, min_requests=1)))
    names = [f"a{n}" for n in range(40)]
    requests = {name: world.runs(name)[0] for name in names}
    held = [name for name in names if rule.holds(name)]
    assert 10 < len(held) < 30
    for name in held:
        assert stop(world, name) == Decision(outcome=AckOutcome.HELD_OUT, attempt=1)
    free = next(name for name in names if name not in held)
    assert stop(world, free).abort == (requests[free],), "what was let through does not count for the brake"
    assert world.says("o", held[0], source=CommandSource.OPERATOR).outcome is AckOutcome.APPLIED
    assert stop(world, held[0], probe="late").outcome is AckOutcome.ALREADY


def test_behind_a_command_that_is_not_applied_the_next_one_that_came_before_its_request_is():
    rule = HoldoutRule(share=0.5)
    held = next(f"mine{n}" for n in range(100) if rule.holds(f"mine{n}"))
    world = World(holdout=rule)
    world.says("probe", held, attempt=1)
    world.says("operator", held, source=CommandSource.OPERATOR)
    _, waiting = world.runs("a", **{held: (1, 0)})
    outcomes = [world.desk.decide(command).outcome for command in waiting]
    assert outcomes == [AckOutcome.HELD_OUT, AckOutcome.APPLIED]


def test_memory_is_bounded_and_what_is_forgotten_is_not_answered_for():
    world = World(most=3)
    for number in range(10):
        world.runs(f"a{number}", mine=(number, 0))
        if number < 9:
            del world.tokens[f"a{number}"]
    assert len(world.desk) == 3
    assert world.says("c", "a0") == Decision()
    assert world.says("d", "a8").outcome is AckOutcome.TOO_LATE
    assert world.says("e", "a9").outcome is AckOutcome.APPLIED


def test_a_flood_of_short_requests_makes_none_that_runs_unstoppable():
    world = World(most=100)
    running = [world.runs(f"long{n}")[0] for n in range(5)]
    for number in range(1000):
        world.runs(f"a{number}")
        del world.tokens[f"a{number}"]
    assert len(world.desk) == 100
    for request in running:
        assert world.says(f"stop {request.engine_id}", request.engine_id).abort == (request,)


def test_more_requests_may_run_than_are_remembered_and_each_can_be_stopped():
    world = World(most=10)
    running = [world.runs(f"a{n}")[0] for n in range(300)]
    assert all(world.says(f"c{n}", request.engine_id).abort == (request,) for n, request in enumerate(running))
    world.tokens.clear()
    for number in range(10):
        world.runs(f"b{number}")
    assert len(world.desk) == 10


def test_ids_of_tens_of_kilobytes_cost_no_gigabytes():
    world = World(most=1000)
    for number in range(500):
        world.runs(f"{number}" + "x" * 60_000)
        world.tokens.clear()
    assert 1 <= len(world.desk) * 60_000 < 2 << 20, "of the 28 MiB that came"
