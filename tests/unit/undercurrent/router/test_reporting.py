"""Sinks and listeners: what they are told, and that their faults stay theirs."""

from __future__ import annotations

import pytest

from tests.unit.undercurrent.router.router_doubles import blocking, point, queued, record
from undercurrent.core import ProbeSignal
from undercurrent.errors import RouterError

KINDS = [point, queued, blocking]


def test_listeners_hear_of_each_request_before_its_end_returns(world):
    heard = []
    with world.router() as router:
        router.on_request_end(lambda *told: heard.append(told))
        router.register_request("r1", [point("a"), queued("b")])
        results = router.end_request("r1")
        assert heard == [("r1", results)]
        router.register_request("r2", [])
    assert heard[1:] == [("r2", {})]


def test_a_listener_cannot_spoil_what_others_get(world):
    heard = []
    with world.router() as router:
        router.on_request_end(lambda request_id, results: results.clear())
        router.on_request_end(lambda request_id, results: heard.extend(results))
        router.register_request("r1", [point()])
        assert list(router.end_request("r1")) == ["mid"]
    assert heard == ["mid"]


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_raises_is_logged_once_and_counted_and_breaks_nothing(world, signals, caplog, kind):
    def broken(*told):
        raise ValueError("full disk")

    world.on_record = lambda record: ProbeSignal("flag")
    with world.router() as router:
        router.attach_log_sink(broken)
        router.attach_log_sink(signals)
        router.attach_metrics_sink(broken)
        router.on_request_end(broken)
        router.register_request("r1", [kind()])
        for at in range(3):
            router.route(record(at))
        assert router.end_request("r1")["mid"].verdict == "done"
        assert router.callback_error_count == 5
    assert [signal.token_pos for _, _, signal in signals.heard] == [0, 1, 2]
    assert (
        len([found for found in caplog.records if "further errors of it are only counted" in found.getMessage()]) == 3
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_sink_is_told_where_a_signal_belongs(world, signals, kind):
    own = ProbeSignal("abort", token_pos=1, layer=2)
    world.on_record = lambda record: own if record.token_pos else ProbeSignal("flag", {"a": 1}, score=0.5)
    with world.router() as router:
        router.attach_log_sink(signals)
        router.register_request("r1", [kind()])
        router.route(record(0))
        router.route(record(7))
    assert signals.heard == [
        ("r1", "mid", ProbeSignal("flag", {"a": 1}, token_pos=0, layer=4, score=0.5)),
        ("r1", "mid", own),
    ]


@pytest.mark.parametrize("method", ["attach_log_sink", "attach_metrics_sink", "on_request_end"])
def test_only_what_can_be_called_is_taken(world, method):
    with world.router() as router, pytest.raises(RouterError, match="cannot be called"):
        getattr(router, method)("a.log")


@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_may_route_and_register_other_requests(world, kind):
    with world.router() as router:

        def sink(request_id, name, signal):
            if request_id == "r1":
                router.register_request("r2", [point()])
                router.route(record(5, "r2"))
                router.end_request("r2")

        world.on_record = lambda record: ProbeSignal("flag")
        router.attach_log_sink(sink)
        router.register_request("r1", [kind()])
        router.route(record(0))
        router.end_request("r1")
        assert router.callback_error_count == 0
    assert world.calls["r2", "mid"] == ["start", 5, "end"]
