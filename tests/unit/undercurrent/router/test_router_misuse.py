"""What a router refuses, and says of it."""

from __future__ import annotations

import pytest

from tests.unit.undercurrent.router.router_doubles import point, queued, record
from undercurrent.core import Probe, ProbeResult, RequestContext
from undercurrent.errors import ProbeNotFoundError, RouterError
from undercurrent.router import Router


class TestMisuse:
    def test_a_live_id_is_refused(self, world):
        with world.router() as router:
            router.register_request("r1", [point()])
            with pytest.raises(RouterError, match="'r1' is registered already"):
                router.register_request("r1", [point()])
            assert router.route(record(3)) is None
        assert world.calls["r1", "mid"] == ["start", 3, "end"]

    def test_an_id_is_refused_while_its_last_request_still_ends(self, world):
        refused = []
        with world.router() as router:

            def again(request_id, results):
                with pytest.raises(RouterError, match="registered already") as caught:
                    router.register_request(request_id, [point()])
                refused.append(caught.value)

            router.on_request_end(again)
            router.register_request("r1", [point()])
            router.end_request("r1")
            assert len(refused) == 1

    def test_unknown_requests_and_points(self, world):
        with world.router() as router:
            with pytest.raises(RouterError, match="'r1' is not live"):
                router.route(record())
            with pytest.raises(RouterError, match="'r1' is not live"):
                router.end_request("r1")
            with pytest.raises(RouterError, match="'r1' is not live"):
                router.get_metrics("r1", "mid")
            router.register_request("r1", [point(), point("late")])
            with pytest.raises(RouterError, match="no point 'early'; its points: mid, late"):
                router.route(record(point="early"))
            with pytest.raises(RouterError, match="no point 'early'"):
                router.get_metrics("r1", "early")

    def test_a_record_after_the_end_is_refused(self, world):
        with world.router() as router:
            router.register_request("r1", [point(), queued("slow")])
            router.end_request("r1")
            for name in ("mid", "slow"):
                with pytest.raises(RouterError, match="not live: it has ended"):
                    router.route(record(point=name))

    @pytest.mark.parametrize(
        ("points", "message"),
        [
            ([point("a"), point("a")], "two points are called 'a'"),
            ([point("a"), point("b", probe_type=None)], "point 'b' names no probe_type"),
            ([point("a"), "b"], "hold str; accepted: ExtractionPoint"),
            (point("a"), "accepted: a list of points"),
            (7, "accepted: a list of points"),
            (
                [point("a"), point("b", probe_type="picky", probe_args={"size": 0})],
                "'picky' cannot be made: ValueError",
            ),
            (
                [point("a"), point("b", probe_type="picky", probe_args={"girth": 0})],
                "'picky' cannot be made: TypeError",
            ),
        ],
    )
    def test_wrong_points_register_nothing(self, world, points, message):
        world.registry.register("picky", Picky)
        with world.router() as router:
            with pytest.raises(RouterError, match=message):
                router.register_request("r1", points)
            assert world.calls == {}
            router.register_request("r1", [point()])

    def test_an_unknown_probe_registers_nothing(self, world):
        with world.router() as router:
            with pytest.raises(ProbeNotFoundError, match="point 'b': no probe is called 'sought'; known: scripted"):
                router.register_request("r1", [point("a"), point("b", probe_type="sought")])
            assert world.calls == {}
            with pytest.raises(RouterError, match="not live"):
                router.route(record(point="a"))

    def test_a_probe_that_does_not_start_ends_those_that_did(self, world):
        def refuse(ctx):
            if ctx.extraction_point_config.name == "b":
                raise OSError("no weights")

        world.on_start = refuse
        with world.router() as router:
            with pytest.raises(RouterError, match="point 'b' did not start: OSError: no weights") as caught:
                router.register_request("r1", [point("a"), queued("b"), point("c")])
            assert isinstance(caught.value.__cause__, OSError)
            with pytest.raises(RouterError, match="not live"):
                router.end_request("r1")
        assert world.calls == {("r1", "a"): ["start", "end"], ("r1", "b"): ["start", "end"]}

    @pytest.mark.parametrize(
        ("request_id", "ctx", "message"),
        [
            ("", None, "request id ''"),
            (7, None, "request id 7"),
            ("r1", RequestContext("r2"), "of request 'r2', not of 'r1'"),
            ("r1", {"user": "ann"}, "the context is dict"),
        ],
    )
    def test_wrong_ids_and_contexts(self, world, request_id, ctx, message):
        with world.router() as router, pytest.raises(RouterError, match=message):
            router.register_request(request_id, [point()], ctx)

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("worker_pool_size", 0),
            ("worker_pool_size", True),
            ("default_queue_depth", 0),
            ("default_queue_depth", 1.5),
            ("default_overflow_policy", "spill"),
            ("drain_timeout", -1),
            ("drain_timeout", float("nan")),
            ("drain_timeout", "soon"),
            ("circuit_breaker_threshold", 0),
        ],
    )
    def test_wrong_settings(self, world, option, value):
        with pytest.raises(RouterError, match=f"{option} is "):
            Router(world.registry, **{option: value})


class Picky(Probe):
    def __init__(self, size=1):
        if not size:
            raise ValueError("no size")

    def on_activation(self, record):
        return None

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, "picky")
