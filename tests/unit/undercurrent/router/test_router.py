"""The router as a user meets it: registering, inline routing, ending, misuse."""

from __future__ import annotations

import gc
import threading

import pytest

from tests.unit.undercurrent.router.router_doubles import Gate, point, queued, record
from undercurrent.core import ProbeRegistry, ProbeResult, ProbeSignal, RequestContext
from undercurrent.errors import RouterError
from undercurrent.router import MetricsSnapshot, OverflowPolicy, Router
from undercurrent.spec import InterventionPolicy, Overflow, parse_dict
from undercurrent.testing.waiting import wait_until

ABORT = ProbeSignal("abort", {"why": "word"}, score=0.9)


def test_overflow_policies_are_those_of_the_spec():
    assert OverflowPolicy is Overflow
    assert [str(policy) for policy in OverflowPolicy] == ["drop_newest", "drop_oldest", "block"]


def test_an_inline_probe_runs_in_route_and_its_signal_comes_back(world):
    world.on_record = lambda record: ABORT if record.token_pos == 2 else None
    with world.router() as router:
        router.register_request("r1", [point()])
        assert [router.route(record(at)) for at in range(4)] == [None, None, ABORT, None]
        assert world.threads == {threading.current_thread().name}
        results = router.end_request("r1")
    assert results == {"mid": ProbeResult("r1", "mid", "done")}
    assert world.calls["r1", "mid"] == ["start", 0, 1, 2, 3, "end"]


def test_each_request_and_point_has_a_probe_of_its_own(world):
    with world.router() as router:
        for request_id in ("r1", "r2"):
            router.register_request(request_id, [point("a"), point("b")])
        router.route(record(0, "r1", "a"))
        router.route(record(1, "r2", "b"))
        assert list(router.end_request("r2")) == ["a", "b"]
        router.route(record(2, "r1", "a"))
        router.end_request("r1")
    assert world.calls == {
        ("r1", "a"): ["start", 0, 2, "end"],
        ("r1", "b"): ["start", "end"],
        ("r2", "a"): ["start", "end"],
        ("r2", "b"): ["start", 1, "end"],
    }


def test_a_probe_hears_its_own_point_and_the_callers_facts(world):
    heard = []
    world.on_start = heard.append
    points = [point("a"), point("b", probe_args={"depth": 3})]
    with world.router() as router:
        router.register_request("r1", points, RequestContext("r1", {"user": "ann"}))
        router.register_request("r2", points)
    assert [ctx.extraction_point_config for ctx in heard] == [*points, *points]
    assert [ctx.prompt_metadata for ctx in heard] == [{"user": "ann"}] * 2 + [{}] * 2
    assert [ctx.request_id for ctx in heard] == ["r1", "r1", "r2", "r2"]


def test_a_whole_spec_may_be_registered(world):
    fields = {"name": "mid", "layers": 4, "tensor_type": "residual_stream", "position": "*", "probe_type": "scripted"}
    with world.router() as router:
        router.register_request("r1", parse_dict({"version": 1, "extraction_points": [fields]}))
        router.route(record(5))
    assert world.seen() == [5]


def test_a_request_without_points_has_no_results(world):
    with world.router() as router:
        router.register_request("r1", [])
        with pytest.raises(RouterError, match="has no point 'mid'; its points: none"):
            router.route(record())
        assert router.end_request("r1") == {}


def test_an_id_may_be_used_anew_after_its_end(world):
    with world.router() as router:
        for _ in range(2):
            router.register_request("r1", [point()])
            router.end_request("r1")
    assert world.calls["r1", "mid"] == ["start", "end"] * 2
    world.calls.clear()


class TestRequestBlock:
    def test_it_registers_routes_and_ends(self, world):
        world.on_record = lambda record: ABORT
        with world.router() as router:
            with router.request(extraction_points=[point()], request_id="r1") as request:
                assert request.request_id == "r1"
                assert request.route(record(0)) is ABORT
                assert request.results == {}
            assert request.results["mid"].verdict == "done"
            with pytest.raises(RouterError, match="not live"):
                request.route(record(1))

    def test_it_makes_an_id(self, world):
        points = [point()]
        with (
            world.router() as router,
            router.request(extraction_points=points) as one,
            router.request(extraction_points=points) as other,
        ):
            assert len({one.request_id, other.request_id}) == 2
            assert one.route(record(4, one.request_id)) is None
        assert world.seen(one.request_id) == [4]

    def test_it_ends_the_request_of_a_failed_block(self, world):
        with world.router() as router:
            with pytest.raises(KeyError, match="oops"), router.request(extraction_points=[point()], request_id="r1"):
                raise KeyError("oops")
            assert world.calls["r1", "mid"] == ["start", "end"]

    def test_a_record_of_another_request_is_refused(self, world):
        with world.router() as router:
            router.register_request("r1", [point()])
            with (
                router.request(extraction_points=[point()], request_id="r2") as request,
                pytest.raises(RouterError, match="'r1' came to 'r2'"),
            ):
                request.route(record(0, "r1"))

    def test_a_request_that_ended_inside_keeps_its_results(self, world):
        with world.router() as router:
            with router.request(extraction_points=[point()], request_id="r1") as request:
                assert router.end_request("r1") == request.results
            assert request.results["mid"].verdict == "done"

    def test_a_shutdown_inside_ends_it(self, world):
        with world.router() as router:
            with router.request(extraction_points=[point()], request_id="r1") as request:
                router.shutdown()
            assert request.results["mid"].verdict == "done"
            with (
                pytest.raises(RouterError, match="the router is shut down"),
                router.request(extraction_points=[point()]),
            ):
                pass


class TestMetrics:
    def test_inline(self, world):
        world.on_record = lambda record: 1 / record.token_pos and None
        with world.router() as router:
            router.register_request("r1", [point()])
            assert router.get_metrics("r1", "mid") == MetricsSnapshot(0, 0, 0, 0, 0.0)
            for at in (0, 1, 2):
                router.route(record(at))
            found = router.get_metrics("r1", "mid")
            assert (found.activation_count, found.error_count, found.drop_count, found.queue_depth) == (3, 1, 0, 0)
            assert 0 < found.avg_activation_latency_seconds < 30

    def test_async(self, world):
        gate = Gate()
        world.on_record = gate
        with world.router(default_queue_depth=3) as router:
            router.register_request("r1", [queued()])
            router.route(record(0))
            gate.wait()
            for at in range(1, 6):
                router.route(record(at))
            found = router.get_metrics("r1", "mid")
            assert (found.queue_depth, found.drop_count, found.activation_count) == (3, 2, 0)
            gate.open(4)
            router.end_request("r1")
        assert world.seen() == [0, 3, 4, 5]

    def test_the_sink_has_the_figures_of_each_point_at_the_end(self, world):
        heard = []
        with world.router() as router:
            router.attach_metrics_sink(lambda *told: heard.append(told))
            router.register_request("r1", [point("a"), queued("b")])
            for at in range(5):
                router.route(record(at, point="b"))
            assert heard == []
            router.end_request("r1")
        assert [(request_id, name, found.activation_count) for request_id, name, found in heard] == [
            ("r1", "a", 0),
            ("r1", "b", 5),
        ]


def test_a_default_intervention_holds_for_inline_points_that_name_none(world):
    policy = InterventionPolicy("block_until_signal", 30_000)
    with world.router(default_intervention_policy=policy) as router:
        router.register_request("r1", [point("default"), point("own", intervention=InterventionPolicy()), queued("a")])
        for name in ("default", "own"):
            world.threads.clear()
            router.route(record(point=name))
            here = threading.current_thread().name in world.threads
            assert here is (name == "own")


def test_a_router_that_is_forgotten_leaves_no_threads(world):
    router = world.router()
    router.register_request("r1", [queued()])
    router.route(record())
    wait_until(lambda: world.seen() == [0], 30)
    [thread] = router._pools[0]._threads
    assert thread.is_alive()
    del router
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_a_result_or_signal_without_metadata_does_no_harm(world):
    world.on_record = lambda record: 1 / 0 if record.token_pos else ProbeSignal("flag", None)
    world.on_end = lambda ctx: ProbeResult(ctx.request_id, "mid", "bare", None, None)
    with world.router() as router:
        router.register_request("r1", [point()])
        router.route(record(0))
        error = router.route(record(1))
        result = router.end_request("r1")["mid"]
    assert (result.verdict, result.signal_history, result.metadata) == ("bare", [error], {"router_errors": 1})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"probe_registry": {}}, "probe_registry is dict; accepted: a ProbeRegistry"),
        ({"default_intervention_policy": "reject"}, "default_intervention_policy is str"),
    ],
)
def test_a_wrong_argument_is_named(arguments, says):
    with pytest.raises(RouterError, match=says):
        Router(**{"probe_registry": ProbeRegistry(), **arguments})
