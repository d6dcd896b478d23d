"""Points whose answer `route` waits for: fallbacks, late answers, order, the open circuit."""

from __future__ import annotations

import threading
import time

import pytest

from tests.unit.undercurrent.router.router_doubles import Call, Gate, blocking, queued, record
from undercurrent.core import ProbeAction, ProbeSignal
from undercurrent.errors import RouterError
from undercurrent.router.interventions import _Waiter
from undercurrent.testing.waiting import wait_until

FLAG = ProbeSignal("flag", score=0.6)
ABORT = ProbeSignal("abort", {"why": "word"}, score=0.9)


def fallback(reason, timeout_ms, **more):
    metadata = {"intervention_fallback": True, "reason": reason, "extraction_point_name": "mid"}
    return metadata | {"timeout_ms": timeout_ms} | more


def events(signals):
    return [signal for _, _, signal in signals.heard if "router_event" in signal.metadata]


def test_route_waits_for_the_answer_of_another_thread(world):
    world.on_record = lambda record: ABORT if record.token_pos else None
    with world.router() as router:
        router.register_request("r1", [blocking()])
        assert router.route(record(0)) is None
        assert router.route(record(1)) is ABORT
        result = router.end_request("r1")["mid"]
    assert result.metadata == {}
    assert world.threads - {threading.current_thread().name} == {
        name for name in world.threads if name.startswith("undercurrent-answer-")
    }


@pytest.mark.parametrize("action", ["continue", "abort"])
def test_a_fallback_stands_in_for_an_answer_that_does_not_come(world, signals, action):
    gate = Gate()
    world.on_record = gate
    with world.router() as router:
        router.attach_log_sink(signals)
        router.register_request("r1", [blocking(timeout_ms=20, on_timeout=action)])
        started_s = time.monotonic()
        answer = router.route(record(3))
        assert time.monotonic() - started_s >= 0.02
        assert answer.action is ProbeAction(action)
        assert answer.metadata == fallback("timeout", 20)
        assert (answer.token_pos, answer.layer) == (3, 4)
        assert signals.heard == [("r1", "mid", answer)]
        gate.open()
        result = router.end_request("r1")["mid"]
    assert world.seen() == [3]
    assert result.signal_history == [answer]
    assert result.metadata == {"fallbacks": 1}


def test_a_record_behind_a_late_one_waits_within_its_own_time_and_order_is_kept(world):
    gate = Gate()
    world.on_record = gate
    with world.router() as router:
        router.register_request("r1", [blocking(timeout_ms=20)])
        for at in range(3):
            assert router.route(record(at)).metadata["reason"] == "timeout"
        assert world.seen() == [0]
        gate.open(3)
        router.end_request("r1")
    assert world.seen() == [0, 1, 2]


class TestLateAnswers:
    def _late(self, router, gate, answer):
        """Have record 0 time out, then let its answer come."""
        gate.answer = answer
        assert router.route(record(0)).metadata["reason"] == "timeout"
        gate.open()
        binding = router._requests["r1"].bindings["mid"]
        wait_until(lambda: binding.metrics.activation_count == 1 and binding._runner is None, 30, "the late answer")

    def _router(self, world, gate, **fields):
        world.on_record = gate
        router = world.router()
        # Long enough for the answers that are meant to come in time.
        router.register_request("r1", [blocking(timeout_ms=400, **fields)])
        return router

    def test_an_abort_that_came_late_is_returned_by_the_next_route(self, world, signals):
        gate = Gate()
        with self._router(world, gate) as router:
            router.attach_log_sink(signals)
            self._late(router, gate, ABORT)
            world.on_record = lambda record: None
            late = router.route(record(1))
            assert (late.action, late.score, late.token_pos, late.layer) == (ProbeAction.ABORT, 0.9, 0, 4)
            assert late.metadata == {"why": "word", "late": True}
            assert router.route(record(2)) is None
            result = router.end_request("r1")["mid"]
        assert result.metadata == {"fallbacks": 1, "late_signals": [late]}
        assert [signal.action for _, _, signal in signals.heard] == ["continue", "abort"]

    def test_an_answer_that_asks_for_as_much_comes_first(self, world):
        gate = Gate()
        with self._router(world, gate) as router:
            self._late(router, gate, FLAG)
            answers = iter([ABORT, FLAG, None])
            world.on_record = lambda record: next(answers)
            assert router.route(record(1)) is ABORT
            assert router.route(record(2)) is FLAG
            assert router.route(record(3)).metadata == {"late": True}
            world.on_record = lambda record: None
            assert router.route(record(4)) is None

    def test_one_that_asks_for_nothing_is_only_recorded(self, world):
        gate = Gate()
        with self._router(world, gate) as router:
            self._late(router, gate, ProbeSignal(score=0.1))
            world.on_record = lambda record: None
            assert router.route(record(1)) is None
            [late] = router.end_request("r1")["mid"].metadata["late_signals"]
            assert (late.score, late.token_pos, late.metadata) == (0.1, 0, {"late": True})


@pytest.mark.parametrize("action", ["continue", "abort"])
def test_a_probe_that_raises_gives_the_fallback_at_once(world, signals, action):
    world.on_record = lambda record: 1 / 0
    with world.router() as router:
        router.attach_log_sink(signals)
        router.register_request("r1", [blocking(on_timeout=action)])
        answer = router.route(record(0))
        assert answer.action is ProbeAction(action)
        more = {"router_error": True, "error": "ZeroDivisionError: division by zero"}
        assert answer.metadata == fallback("probe_error", 30_000, **more)
        assert router.get_metrics("r1", "mid").error_count == 1
        assert router.get_metrics("r1", "mid").fallback_count == 1
    assert signals.heard == [("r1", "mid", answer)]


def test_a_full_queue_gives_the_fallback_and_drops_the_record(world):
    gate = Gate()
    world.on_record = gate
    with world.router(default_queue_depth=2) as router:
        router.register_request("r1", [blocking(timeout_ms=20)])
        for at in range(4):
            assert router.route(record(at)).metadata["reason"] == "timeout"
        assert router.get_metrics("r1", "mid").drop_count == 1
        gate.open(3)
    assert world.seen() == [0, 1, 2]


def test_the_end_gives_a_waiting_route_its_answer(world):
    gate = Gate(ABORT)
    world.on_record = gate
    with world.router() as router:
        router.register_request("r1", [blocking()])
        call = Call(router.route, record(0))
        gate.wait()
        end = Call(router.end_request, "r1")
        wait_until(lambda: "r1" not in router._requests, 30)
        gate.open()
        assert call.result() is ABORT
        assert end.result()["mid"].verdict == "done"


def test_a_route_whose_record_is_given_up_gets_the_fallback(world):
    gate = Gate()
    world.on_record = gate
    with world.router(drain_timeout=0.05) as router:
        router.register_request("r1", [blocking(on_timeout="abort")])
        first = Call(router.route, record(0))
        gate.wait()
        second = Call(router.route, record(1))
        wait_until(lambda: router.get_metrics("r1", "mid").queue_depth == 1, 30)
        result = router.end_request("r1")["mid"]
        answer = second.result()
        assert (answer.action, answer.metadata) == (ProbeAction.ABORT, fallback("request_ended", 30_000))
        assert (result.verdict, result.metadata["undrained"]) == ("error", 1)
        gate.open()
        assert first.result() is None
    assert world.calls["r1", "mid"] == ["start", 0]


def test_an_answer_that_comes_as_the_time_runs_out_is_taken(world):
    with world.router() as router:
        router.register_request("r1", [blocking(timeout_ms=1)])
        binding = router._requests["r1"].bindings["mid"]
        waiter = _Waiter(record(0), awaited=True)
        waiter.judged, waiter.signal = True, ABORT
        assert binding._await(waiter) is None
        assert (waiter.signal, waiter.abandoned) == (ABORT, False)


def test_a_record_that_times_out_and_then_raises_is_one_failure(world):
    gate = Gate()

    def judge(record):
        gate(record)
        raise ValueError("too late, and wrong")

    world.on_record = judge
    with world.router(circuit_breaker_threshold=2) as router:
        router.register_request("r1", [blocking(timeout_ms=20, on_timeout="abort")])
        circuit = router._requests["r1"].bindings["mid"]._wiring.circuit
        assert router.route(record(0)).metadata["reason"] == "timeout"
        gate.open()
        late = router.end_request("r1")["mid"].signal_history[1]
        assert (circuit.failures, circuit.is_open) == (1, False)
    assert (late.action, late.metadata["error"]) == (ProbeAction.CONTINUE, "ValueError: too late, and wrong")


def test_a_backlog_of_async_points_makes_no_answer_late(world):
    gate = Gate()
    world.on_record = lambda record: gate(record) if record.request_id == "busy" else ABORT
    with world.router(worker_pool_size=1) as router:
        router.register_request("busy", [queued()])
        router.register_request("r1", [blocking()])
        router.route(record(0, "busy"))
        gate.wait()
        assert router.route(record(0)) is ABORT
        gate.open()


class TestOpenCircuit:
    def _open(self, router, gate, failures=2):
        for at in range(failures):
            assert router.route(record(at)).metadata["reason"] == "timeout"

    def test_nothing_waits_for_a_point_that_keeps_failing(self, world, signals, caplog):
        gate = Gate()
        world.on_record = gate
        with world.router(circuit_breaker_threshold=2) as router:
            router.attach_log_sink(signals)
            router.register_request("r1", [blocking(timeout_ms=20, on_timeout="abort")])
            self._open(router, gate)
            assert router.route(record(2)) is None
            [event] = events(signals)
            assert event.action is ProbeAction.FLAG
            assert event.metadata == {
                "router_event": "circuit_opened",
                "extraction_point_name": "mid",
                "circuit_breaker_threshold": 2,
            }
            logged = [found.getMessage() for found in caplog.records if "in a row" in found.getMessage()]
            assert logged == ["point 'mid': 2 failures in a row; it now runs as reject, and nothing waits for it"]
            gate.open(3)
            router.end_request("r1")
        assert world.seen() == [0, 1, 2]

    def test_it_is_open_for_other_requests_too_and_an_abort_still_comes_through(self, world):
        gate = Gate()
        world.on_record = gate
        with world.router(circuit_breaker_threshold=2) as router:
            router.register_request("r1", [blocking(timeout_ms=20)])
            router.register_request("r2", [blocking(timeout_ms=30_000)])
            self._open(router, gate)
            gate.open(2)
            router.end_request("r1")
            gate.answer = ABORT
            assert router.route(record(0, "r2")) is None
            world.on_record = lambda record: None
            gate.open()
            binding = router._requests["r2"].bindings["mid"]
            wait_until(lambda: binding._late is not None, 30, "the late abort")
            late = router.route(record(1, "r2"))
            assert (late.action, late.token_pos, late.metadata["late"]) == (ProbeAction.ABORT, 0, True)

    def test_answers_in_time_close_it_again(self, world, signals):
        gate = Gate()
        world.on_record = gate
        with world.router(circuit_breaker_threshold=2) as router:
            router.attach_log_sink(signals)
            router.register_request("r1", [blocking(timeout_ms=20)])
            router.register_request("r2", [blocking()])
            self._open(router, gate)
            world.on_record = lambda record: ABORT if record.token_pos == 9 else None
            for at in range(2):
                router.route(record(at, "r2"))
            wait_until(lambda: len(events(signals)) == 2, 30)
            found = events(signals)
            assert [event.metadata["router_event"] for event in found] == ["circuit_opened", "circuit_closed"]
            assert found[1].action is ProbeAction.CONTINUE
            assert router.route(record(9, "r2")) is ABORT
            gate.open(2)

    def test_a_record_after_the_end_is_refused(self, world):
        gate = Gate()
        world.on_record = gate
        with world.router(circuit_breaker_threshold=2) as router:
            router.register_request("r1", [blocking(timeout_ms=20)])
            self._open(router, gate)
            gate.open(2)
            route = router._requests["r1"].routes["mid"]
            router.end_request("r1")
            with pytest.raises(RouterError, match="takes no more records"):
                route(record(2))

    def test_errors_open_it_and_then_only_say_so(self, world):
        world.on_record = lambda record: 1 / 0
        with world.router(circuit_breaker_threshold=3) as router:
            router.register_request("r1", [blocking(on_timeout="abort")])
            actions = [router.route(record(at)).action for at in range(3)]
            assert actions == [ProbeAction.ABORT] * 3
            assert router.route(record(3)) is None
            history = router.end_request("r1")["mid"].signal_history
        assert [signal.action for signal in history] == ["abort", "abort", "abort", "continue"]
        assert history[3].metadata["router_error"] is True
        assert "intervention_fallback" not in history[3].metadata

    @pytest.mark.parametrize(("policy", "left"), [("block", [0, 4, 5]), ("drop_newest", [0, 1, 2]), (None, [0, 4, 5])])
    def test_a_full_queue_of_an_open_circuit_drops_and_never_blocks(self, world, policy, left):
        gate = Gate()
        world.on_record = gate
        with world.router(circuit_breaker_threshold=1, default_queue_depth=2) as router:
            router.register_request("r1", [blocking(timeout_ms=20, overflow=policy)])
            self._open(router, gate, 1)
            for at in range(1, 6):
                assert router.route(record(at)) is None
            gate.open(3)
            assert router.end_request("r1")["mid"].metadata["dropped"] == 3
        assert world.seen() == left

    @pytest.mark.parametrize("threshold", [None, 3])
    def test_it_stays_closed_below_its_threshold(self, world, threshold):
        answers = iter([1, 1, 0, 1, 1, 0])
        world.on_record = lambda record: 1 / 0 if next(answers) else None
        with world.router(circuit_breaker_threshold=threshold) as router:
            router.register_request("r1", [blocking()])
            found = [router.route(record(at)) for at in range(6)]
        assert [answer is not None for answer in found] == [True, True, False, True, True, False]
