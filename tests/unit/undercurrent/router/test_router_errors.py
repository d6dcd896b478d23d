"""Probes that fail, and what a router makes of it."""

from __future__ import annotations

import pytest

from tests.unit.undercurrent.router.router_doubles import blocking, point, queued, record
from undercurrent.core import ProbeAction
from undercurrent.errors import RouterError
from undercurrent.testing.waiting import wait_until


class TestErrors:
    def test_a_probe_that_raises_lets_the_generation_go_on(self, world, signals):
        world.on_record = lambda record: {}["gone"] if record.token_pos == 1 else None
        with world.router() as router:
            router.attach_log_sink(signals)
            router.register_request("r1", [point()])
            answers = [router.route(record(at)) for at in range(3)]
            result = router.end_request("r1")["mid"]
        assert answers[0] is None
        assert answers[2] is None
        assert answers[1].action is ProbeAction.CONTINUE
        assert answers[1].metadata["router_error"] is True
        assert answers[1].metadata["error"] == "KeyError: 'gone'"
        assert (answers[1].token_pos, answers[1].layer) == (1, 4)
        assert signals.heard == [("r1", "mid", answers[1])]
        assert (result.verdict, result.signal_history, result.metadata) == ("done", [answers[1]], {"router_errors": 1})

    def test_an_answer_that_is_no_signal_is_an_error(self, world):
        world.on_record = lambda record: 0.5
        with world.router() as router:
            router.register_request("r1", [point()])
            answer = router.route(record())
        assert "returned float; accepted: a ProbeSignal or None" in answer.metadata["error"]

    def test_an_error_whose_text_raises(self, world):
        class RudeError(Exception):
            def __str__(self):
                raise RuntimeError("no")

        def raise_it(record):
            raise RudeError

        world.on_record = raise_it
        with world.router() as router:
            router.register_request("r1", [point()])
            assert router.route(record()).metadata["error"] == "RudeError"

    def test_it_is_logged_once_per_request_and_point(self, world, caplog):
        world.on_record = lambda record: 1 / 0
        with world.router() as router:
            router.register_request("r1", [point()])
            for at in range(4):
                router.route(record(at))
        logged = [found.getMessage() for found in caplog.records]
        assert logged == ["request r1, point 'mid': the probe raised at token 0; further errors are only counted"]

    def test_ctrl_c_in_an_inline_probe_reaches_the_caller(self, world):
        def interrupted(record):
            raise KeyboardInterrupt

        world.on_record = interrupted
        with world.router() as router:
            router.register_request("r1", [point()])
            with pytest.raises(KeyboardInterrupt):
                router.route(record())
            world.on_record = lambda record: None
            assert router.route(record(1)) is None
        assert world.seen() == [0, 1]

    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            (ValueError("torn"), "on_end raised ValueError: torn"),
            ("fine", "on_end returned str; accepted: a ProbeResult"),
        ],
    )
    def test_an_end_that_fails_is_a_result_too(self, world, made, reason):
        def end(ctx):
            if isinstance(made, Exception):
                raise made
            return made if ctx.extraction_point_config.name == "a" else None

        world.on_end = lambda ctx: end(ctx) if ctx.extraction_point_config.name == "a" else None
        with world.router() as router:
            router.register_request("r1", [point("a"), point("b")])
            results = router.end_request("r1")
        assert results["a"].verdict == "error"
        assert results["a"].metadata == {"router_error": True, "reason": reason}
        assert results["b"].verdict == "done"

    def test_a_probe_that_routes_into_its_own_point_is_refused(self, world):
        with world.router() as router:
            world.on_record = lambda _: router.route(record(9))
            router.register_request("r1", [point()])
            assert "routes into the point that it judges" in router.route(record(0)).metadata["error"]
        assert world.seen() == [0]

    @pytest.mark.parametrize("kind", [point, queued, blocking])
    def test_a_probe_cannot_end_its_own_request(self, world, kind):
        heard = []

        def end(record):
            try:
                router.end_request("r1")
            except RouterError as exc:
                heard.append(str(exc))

        world.on_record = end
        with world.router() as router:
            router.register_request("r1", [kind()])
            router.route(record())
            wait_until(lambda: heard, 30)
            assert router.end_request("r1")["mid"].verdict == "done"
        assert heard == ["request 'r1': one of its own probes or sinks asks for its end"]
