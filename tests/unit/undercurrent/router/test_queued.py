"""Async points: order, fairness, overflow, drain."""

from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.undercurrent.router.router_doubles import Call, Gate, World, point, queued, record
from undercurrent.core import ProbeAction, ProbeSignal
from undercurrent.errors import RouterError
from undercurrent.testing.waiting import wait_until


def test_route_returns_at_once_and_the_probe_runs_elsewhere(world):
    gate = Gate(ProbeSignal("abort"))
    world.on_record = gate
    with world.router() as router:
        router.register_request("r1", [queued()])
        assert router.route(record(0)) is None
        gate.wait()
        assert router.route(record(1)) is None
        gate.open(2)
        router.end_request("r1")
    assert world.seen() == [0, 1]


def test_the_end_waits_for_what_was_routed(world):
    with world.router() as router:
        router.register_request("r1", [queued(queue_depth=1000)])
        for at in range(1000):
            router.route(record(at))
        assert router.end_request("r1")["mid"].verdict == "done"
    assert world.calls["r1", "mid"] == ["start", *range(1000), "end"]


def test_an_error_is_a_signal_and_the_probe_goes_on(world, signals):
    def judge(record):
        if record.token_pos == 1:
            raise SystemExit("out")

    world.on_record = judge
    with world.router(worker_pool_size=1) as router:
        router.attach_log_sink(signals)
        router.register_request("r1", [queued()])
        for at in range(3):
            router.route(record(at))
        result = router.end_request("r1")["mid"]
    assert world.seen() == [0, 1, 2]
    [(request_id, name, signal)] = signals.heard
    assert (request_id, name, signal.action) == ("r1", "mid", ProbeAction.CONTINUE)
    assert signal.metadata == {"router_error": True, "error": "SystemExit: out", "extraction_point_name": "mid"}
    assert result.signal_history == [signal]
    assert result.metadata == {"router_errors": 1}


def test_signals_of_async_probes_go_to_the_log_sink(world, signals):
    world.on_record = lambda record: ProbeSignal("flag" if record.token_pos else "continue")
    with world.router() as router:
        router.attach_log_sink(signals)
        router.register_request("r1", [queued()])
        for at in range(3):
            router.route(record(at))
    assert [(signal.action, signal.token_pos, signal.layer) for _, _, signal in signals.heard] == [
        (ProbeAction.FLAG, 1, 4),
        (ProbeAction.FLAG, 2, 4),
    ]


def test_a_sink_that_wants_to_leave_takes_no_worker_with_it(world, caplog):
    def leave(*told):
        raise SystemExit("out")

    world.on_record = lambda record: ProbeSignal("flag")
    with world.router(worker_pool_size=1) as router:
        router.attach_log_sink(leave)
        router.register_request("r1", [queued()])
        for at in range(3):
            router.route(record(at))
        assert router.end_request("r1")["mid"].verdict == "done"
    assert world.seen() == [0, 1, 2]
    assert "a record was not handled to its end" in caplog.text


class TestOverflow:
    @pytest.mark.parametrize(
        ("policy", "left"), [("drop_oldest", [0, 4, 5, 6]), ("drop_newest", [0, 1, 2, 3]), (None, [0, 4, 5, 6])]
    )
    def test_what_is_dropped(self, world, policy, left):
        gate = Gate()
        world.on_record = gate
        with world.router() as router:
            router.register_request("r1", [queued(overflow=policy, queue_depth=3)])
            router.route(record(0))
            gate.wait()
            for at in range(1, 7):
                router.route(record(at))
            gate.open(4)
            result = router.end_request("r1")["mid"]
        assert world.seen() == left
        assert result.metadata == {"dropped": 3}

    def test_the_routers_policy_holds_where_the_point_names_none(self, world):
        gate = Gate()
        world.on_record = gate
        with world.router(default_overflow_policy="drop_newest", default_queue_depth=1) as router:
            router.register_request("r1", [queued()])
            router.route(record(0))
            gate.wait()
            router.route(record(1))
            router.route(record(2))
            gate.open(2)
        assert world.seen() == [0, 1]

    def test_block_waits_for_room_and_loses_nothing(self, world):
        with world.router() as router:
            router.register_request("r1", [queued(overflow="block", queue_depth=2)])
            Call(lambda: [router.route(record(at)) for at in range(2000)]).result()
            found = router.end_request("r1")["mid"]
        assert world.seen() == list(range(2000))
        assert found.metadata == {}

    def _blocked(self, router, gate):
        """Return a call that waits for room."""
        router.register_request("r1", [queued(overflow="block", queue_depth=1)])
        router.route(record(0))
        gate.wait()
        router.route(record(1))
        call = Call(router.route, record(2))
        wait_until(lambda: _waits_for_room(router), 30, "a route that waits for room", every_s=0.001)
        assert not call.done
        return call

    def test_a_request_is_not_at_rest_while_a_route_waits_for_room(self, world):
        # Its record is about to be counted as dropped, and the result says how many were.
        gate = Gate()
        world.on_record = gate
        with world.router() as router:
            call = self._blocked(router, gate)
            binding = router._requests["r1"].bindings["mid"]
            with binding._lock:
                binding._runner, runner = None, binding._runner
                assert not binding._at_rest()
                binding._runner = runner
            gate.open(3)
            call.result()
            router.end_request("r1")
            assert binding._at_rest()

    def test_block_ends_when_there_is_room(self, world):
        gate = Gate()
        world.on_record = gate
        with world.router() as router:
            call = self._blocked(router, gate)
            gate.open()
            assert call.result() is None
            gate.open(2)
        assert world.seen() == [0, 1, 2]

    def test_block_ends_with_the_request(self, world):
        gate = Gate()
        world.on_record = gate
        with world.router() as router:
            call = self._blocked(router, gate)
            end = Call(router.end_request, "r1")
            assert call.result() is None
            assert not end.done
            gate.open(2)
            assert end.result()["mid"].metadata == {"dropped": 1}
        assert world.seen() == [0, 1]

    def test_block_ends_with_the_router(self, world):
        gate = Gate()
        world.on_record = gate
        router = world.router()
        call = self._blocked(router, gate)
        shutdown = Call(router.shutdown)
        assert call.result() is None
        gate.open(2)
        shutdown.result()
        assert world.calls["r1", "mid"] == ["start", 0, 1, "end"]


def _waits_for_room(router):
    binding = router._requests["r1"].bindings["mid"]
    condition = binding._changed
    return condition is not None and len(condition._waiters) == 1


class TestDrain:
    def test_a_drain_that_takes_too_long_is_given_up_and_on_end_comes_after_the_running_call(self, world):
        gate = Gate()
        world.on_record = gate
        with world.router(drain_timeout=1.0) as router:
            router.register_request("r1", [queued()])
            for at in range(5):
                router.route(record(at))
            gate.wait()
            binding = router._requests["r1"].bindings["mid"]
            end = Call(router.end_request, "r1")
            wait_until(lambda: not binding._items, 30, "the queue to be given up", every_s=0.001)
            gate.open()
            result = end.result()["mid"]
        assert (result.verdict, result.metadata) == ("done", {"drained": False, "undrained": 4})
        assert world.calls["r1", "mid"] == ["start", 0, "end"]

    @pytest.mark.parametrize("kind", [point, queued])
    def test_a_stuck_probe_is_left_alone(self, world, kind):
        gate = Gate()
        world.on_record = gate
        with world.router(drain_timeout=0.05) as router:
            router.register_request("r1", [kind(), point("other")])
            call = Call(router.route, record(0))
            gate.wait()
            results = router.end_request("r1")
            assert results["mid"].verdict == "error"
            assert "did not return in time; on_end was not called" in results["mid"].metadata["reason"]
            assert results["other"].verdict == "done"
            gate.open()
            assert call.result() is None
        assert world.calls["r1", "mid"] == ["start", 0]

    def test_on_end_waits_for_an_inline_call_on_another_thread(self, world):
        gate = Gate()
        world.on_record = gate
        with world.router() as router:
            router.register_request("r1", [point()])
            call = Call(router.route, record(0))
            gate.wait()
            end = Call(router.end_request, "r1")
            wait_until(lambda: "r1" not in router._requests, 30)
            assert "end" not in world.calls["r1", "mid"]
            gate.open()
            assert call.result() is None
            assert end.result()["mid"].verdict == "done"


class TestSharedWorkers:
    def test_ten_thousand_bindings_share_eight_threads(self, world):
        ids = [f"r{number}" for number in range(10_000)]
        before = {thread.name for thread in threading.enumerate()}
        with world.router(worker_pool_size=8) as router:
            for request_id in ids:
                router.register_request(request_id, [queued()])
            for at in range(3):
                for request_id in ids:
                    router.route(record(at, request_id))
            new = [t.name for t in threading.enumerate() if t.name.startswith("undercurrent") and t.name not in before]
            assert len(new) <= 8
            router.shutdown(timeout=120)
        assert all(world.calls[request_id, "mid"] == ["start", 0, 1, 2, "end"] for request_id in ids)

    def test_a_long_backlog_does_not_starve_another_request(self, world):
        order = []
        gate = Gate()
        holds = threading.Event()

        def judge(record):
            if not holds.is_set():
                holds.set()
                gate(record)
            order.append((record.request_id, record.token_pos))

        world.on_record = judge
        with world.router(worker_pool_size=1, default_queue_depth=1000) as router:
            router.register_request("long", [queued()])
            router.register_request("short", [queued()])
            for at in range(1000):
                router.route(record(at, "long"))
            gate.wait()
            router.route(record(0, "short"))
            gate.open()
        assert len(order) == 1001
        assert order.index(("short", 0)) <= 32

    def test_a_probe_that_never_returns_holds_one_thread_only(self, world):
        gate = Gate()
        world.on_record = lambda record: gate(record) if record.request_id == "stuck" else None
        with world.router(worker_pool_size=2) as router:
            router.register_request("stuck", [queued()])
            router.route(record(0, "stuck"))
            gate.wait()
            for number in range(20):
                router.register_request(f"r{number}", [queued()])
                router.route(record(number, f"r{number}"))
                router.end_request(f"r{number}")
                assert world.seen(f"r{number}") == [number]
            gate.open()


@settings(max_examples=25)
@given(
    bindings=st.integers(1, 30),
    depth=st.integers(1, 50),
    policy=st.sampled_from(["drop_oldest", "drop_newest", "block"]),
    producers=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_order_is_kept_and_every_record_accounted_for(bindings, depth, policy, producers, seed):
    world = World()
    ids = [f"r{number}" for number in range(bindings)]
    per_binding = 60
    metrics = {}

    def produce(router, mine):
        todo = [request_id for request_id in mine for _ in range(per_binding)]
        random.Random(seed).shuffle(todo)
        at = dict.fromkeys(mine, 0)
        for request_id in todo:
            router.route(record(at[request_id], request_id))
            at[request_id] += 1

    with world.router(worker_pool_size=8, default_queue_depth=depth, default_overflow_policy=policy) as router:
        router.attach_metrics_sink(lambda request_id, name, found: metrics.update({request_id: found}))
        for request_id in ids:
            router.register_request(request_id, [queued()])
        for call in [Call(produce, router, ids[number::producers]) for number in range(producers)]:
            call.result()
    assert world.overlaps == 0
    for request_id in ids:
        told = world.calls[request_id, "mid"]
        seen = told[1:-1]
        assert (told[0], told[-1]) == ("start", "end")
        assert seen == sorted(set(seen))
        assert len(seen) + metrics[request_id].drop_count == per_binding
        assert metrics[request_id].activation_count == len(seen)
        if policy == "block":
            assert len(seen) == per_binding


@pytest.mark.parametrize("kind", [point, queued])
def test_ends_that_race_with_routes_lose_no_record_and_call_no_ended_probe(world, kind):
    ids = [f"r{number}" for number in range(200)]
    accepted = {}

    def produce(router, request_id):
        count = 0
        try:
            for at in range(100_000):
                router.route(record(at, request_id))
                count += 1
                time.sleep(0)  # lets the other threads in
        except RouterError:
            return count
        raise AssertionError("the request never ended")

    with world.router(worker_pool_size=8, default_overflow_policy="block") as router:
        for start in range(0, len(ids), 4):
            batch = ids[start : start + 4]
            for request_id in batch:
                router.register_request(request_id, [kind()])
            calls = {request_id: Call(produce, router, request_id) for request_id in batch}
            for request_id in batch:
                wait_until(lambda one=request_id: world.seen(one), 30, "a first record", every_s=0.001)
                metadata = router.end_request(request_id)["mid"].metadata
                accepted[request_id] = calls[request_id].result() - metadata.get("dropped", 0)
    for request_id, count in accepted.items():
        assert world.calls[request_id, "mid"] == ["start", *range(count), "end"]
