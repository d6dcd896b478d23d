"""Shutdown, and requests that leave while others do."""

from __future__ import annotations

import threading

import pytest

from tests.unit.undercurrent.router.router_doubles import Call, Gate, blocking, point, queued, record
from undercurrent.errors import RouterError
from undercurrent.testing.waiting import wait_until

KINDS = [point, queued, blocking]


def threads_of(router):
    return [thread for pool in router._pools for thread in pool._threads]


def test_it_ends_live_requests_tells_listeners_and_stops_its_threads(world):
    heard = {}
    router = world.router()
    router.on_request_end(heard.__setitem__)
    for number in range(5):
        router.register_request(f"r{number}", [kind(kind.__name__) for kind in KINDS])
        for kind in KINDS:
            router.route(record(number, f"r{number}", kind.__name__))
    threads = threads_of(router)
    router.shutdown()
    assert len(threads) == 4
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(heard) == [f"r{number}" for number in range(5)]
    for (request_id, _), told in world.calls.items():
        assert told == ["start", int(request_id[1:]), "end"]


def test_everything_but_shutdown_is_refused_afterwards(world):
    router = world.router()
    router.register_request("r1", [point()])
    router.shutdown()
    router.shutdown()
    router.shutdown(wait=False)
    for use in (
        lambda: router.route(record()),
        lambda: router.register_request("r2", [point()]),
        lambda: router.end_request("r1"),
        lambda: router.get_metrics("r1", "mid"),
        lambda: router.request(extraction_points=[point()]).__enter__(),
    ):
        with pytest.raises(RouterError, match="the router is shut down"):
            use()


def test_without_waiting_it_ends_in_the_background(world):
    gate = Gate()
    world.on_record = gate
    heard = {}
    router = world.router()
    router.on_request_end(heard.__setitem__)
    router.register_request("r1", [queued()])
    router.route(record(0))
    gate.wait()
    router.shutdown(wait=False)
    assert heard == {}
    with pytest.raises(RouterError, match="shut down"):
        router.route(record(1))
    gate.open()
    router.shutdown()
    assert heard["r1"]["mid"].verdict == "done"
    assert not any(thread.is_alive() for thread in threads_of(router))


def test_a_stuck_probe_holds_it_for_its_timeout_alone(world, caplog):
    gate = Gate()
    world.on_record = lambda record: gate(record) if record.request_id == "stuck" else None
    heard = {}
    router = world.router()
    router.on_request_end(heard.__setitem__)
    router.register_request("stuck", [queued()])
    router.register_request("r1", [queued()])
    router.route(record(0, "stuck"))
    router.route(record(1, "stuck"))
    gate.wait()
    router.route(record(0))
    Call(router.shutdown, True, 0.05).result()
    assert heard["stuck"]["mid"].verdict == "error"
    assert heard["stuck"]["mid"].metadata["undrained"] == 1
    assert heard["r1"]["mid"].verdict == "done"
    assert "threads that are stuck in a probe end with it" in caplog.text
    gate.open()
    for thread in threads_of(router):
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads_of(router))
    assert world.calls["stuck", "mid"] == ["start", 0]


def test_a_wrong_timeout_changes_nothing(world):
    with world.router() as router:
        with pytest.raises(RouterError, match="timeout is -1"):
            router.shutdown(timeout=-1)
        router.register_request("r1", [point()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_may_shut_the_router_down(world, kind):
    router = world.router(drain_timeout=1.0)
    world.on_record = lambda record: router.shutdown()
    heard = {}
    router.on_request_end(heard.__setitem__)
    router.register_request("r1", [kind()])
    router.register_request("r2", [point()])
    Call(router.route, record()).result()
    router.shutdown()
    assert heard["r1"]["mid"].verdict == "error"
    assert heard["r2"]["mid"].verdict == "done"


def test_a_listener_may_shut_the_router_down(world):
    router = world.router()
    heard = []

    def listener(request_id, results):
        heard.append(request_id)
        router.shutdown()

    router.on_request_end(listener)
    for request_id in ("r1", "r2"):
        router.register_request(request_id, [queued()])
    Call(router.end_request, "r1").result()
    assert heard == ["r1", "r2"]


def test_it_waits_for_an_end_on_another_thread(world):
    gate = Gate()
    world.on_record = gate
    router = world.router()
    # More than one turn: a binding that stands in line again behind the end of the threads would never be run.
    router.register_request("r1", [queued(queue_depth=100)])
    for at in range(40):
        router.route(record(at))
    gate.wait()
    end = Call(router.end_request, "r1")
    wait_until(lambda: "r1" not in router._requests, 30)
    shutdown = Call(router.shutdown)
    wait_until(lambda: router._live._changed._waiters, 30, "a shutdown that waits")
    gate.open(40)
    assert end.result()["mid"].metadata == {}
    shutdown.result()
    assert world.calls["r1", "mid"] == ["start", *range(40), "end"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_is_on_its_way_when_the_request_ends_is_refused(world, kind):
    with world.router() as router:
        router.register_request("r1", [kind()])
        route = router._requests["r1"].routes["mid"]
        router.end_request("r1")
        with pytest.raises(RouterError, match="'r1' has ended: point 'mid' takes no more records"):
            route(record(0))
    assert world.calls["r1", "mid"] == ["start", "end"]


def test_a_registration_that_a_shutdown_overtakes_ends_its_probes(world):
    started, go_on = threading.Event(), threading.Event()

    def slow_start(ctx):
        started.set()
        assert go_on.wait(30)

    world.on_start = slow_start
    heard = {}
    router = world.router()
    router.on_request_end(heard.__setitem__)
    call = Call(router.register_request, "r1", [point()])
    assert started.wait(30)
    router.shutdown()
    go_on.set()
    with pytest.raises(RouterError, match="the router is shut down"):
        call.result()
    assert world.calls["r1", "mid"] == ["start", "end"]
    assert heard == {}


def test_of_many_that_end_a_request_one_succeeds(world):
    outcomes = []
    with world.router() as router:
        for number in range(50):
            router.register_request("r1", [queued()])
            router.route(record(number))
            barrier = threading.Barrier(4)

            def end(barrier=barrier):
                barrier.wait(30)
                try:
                    return router.end_request("r1")["mid"].verdict
                except RouterError:
                    return "refused"

            calls = [Call(end) for _ in range(4)]
            outcomes.append(sorted(call.result() for call in calls))
            assert world.calls.pop(("r1", "mid")) == ["start", number, "end"]
    assert outcomes == [["done", "refused", "refused", "refused"]] * 50


def test_a_shutdown_that_races_with_routes_and_ends(world):
    for _ in range(20):
        router = world.router()
        ids = [f"r{number}" for number in range(8)]
        for request_id in ids:
            router.register_request(request_id, [kind(kind.__name__) for kind in KINDS])

        def use(request_id, router=router):
            try:
                for at in range(10_000):
                    for kind in KINDS:
                        router.route(record(at, request_id, kind.__name__))
                    if at == 50:
                        router.end_request(request_id)
            except RouterError:
                return at
            raise AssertionError("the router never stopped")

        calls = [Call(use, request_id) for request_id in ids]
        wait_until(lambda: world.seen("r0", "queued"), 30, every_s=0.001)
        router.shutdown()
        for call in calls:
            call.result()
        assert not any(thread.is_alive() for thread in threads_of(router))
        assert len(world.calls) == 24
        assert all((told[0], told[-1]) == ("start", "end") for told in world.calls.values())
        world.calls.clear()
