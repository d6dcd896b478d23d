"""Probes that join two points, as processes on a real broker: killed, joined, refused, and guards of an engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.faults.rounds import Rounds
from undercurrent.evaluation.diff import collect
from undercurrent.insight.looking import Looker
from undercurrent.insight.reading import Pipeline
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import Assignor
from undercurrent.protocol.messages import (
    GuardState,
    Outcome,
    ProbeHeartbeat,
    ProbeVerdict,
    PromptRequest,
    Sampling,
    VerdictKind,
)
from undercurrent.spec import ExtractionPoint
from undercurrent.testing.brokers import QUICK
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.fake_engine import activation
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.streams import StreamBuilder

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]

POINTS = ("residual", "attn")
LAYERS = (0, 1)
WIDTH = 4
BLOCKS = 16
WEIGHT = np.random.default_rng(7).normal(size=len(POINTS) * len(LAYERS) * WIDTH)
THRESHOLD = 9.0
BINDING = {"name": "both", "points": list(POINTS), "probe": "./both", "mode": "abort"}


def make_bench(broker, folder, assignor, **options):
    quick = {} if assignor is Assignor.CONSUMER else QUICK
    bench = ProbeBench(
        broker.settings(**quick, **options), folder, assignor=assignor, others=POINTS[1:], layers=LAYERS, partitions=3
    )
    bench.save_linear("both", WEIGHT, threshold=THRESHOLD)
    return bench


class Traffic(Rounds):
    """Requests with a stream at each point, whose logs get their records at a different pace and in other blocks."""

    def __init__(self, bench, count=7):
        self._bench = bench
        self.rows = {}
        self._left = {}
        for number in range(count):
            name, rng = f"request-{number}", np.random.default_rng(number)
            rows = rng.normal(size=(BLOCKS, len(POINTS), len(LAYERS), WIDTH)).astype(np.float32)
            if number % 3 == 0:
                rows[10] += 8 * np.sign(WEIGHT).reshape(rows.shape[1:])
            self.rows[name] = rows
            for side, point in enumerate(POINTS):
                stream = StreamBuilder(name, point=point, layers=LAYERS, prompt_len=2, points=POINTS)
                step = 1 + side
                values = [stream.start()]
                values += [
                    stream.block(range(at, at + step), rows[at : at + step, side]) for at in range(0, BLOCKS, step)
                ]
                self._left[name, point] = [*values, stream.end()][::-1]
        self._whole = {key: len(left) for key, left in self._left.items()}

    @property
    def open(self):
        """Streams of which the log has the start and not the end."""
        return [key for key, left in self._left.items() if 0 < len(left) < self._whole[key]]

    def round(self):
        """Append a message to each stream that has one left; return whether any had."""
        todo = [(key, left) for key, left in self._left.items() if left]
        for (name, point), left in todo:
            self._bench.write(name.encode(), [left.pop()], point=point)
        return bool(todo)

    def expected(self):
        """Return what a plain loop over the rows says: scores by token, and where the threshold is reached first."""
        scores = {
            name: [float(np.float32(row.reshape(-1).astype(np.float64) @ WEIGHT.astype(np.float32))) for row in rows]
            for name, rows in self.rows.items()
        }
        acts = {
            name: next((at for at, s in enumerate(found) if s >= THRESHOLD), None) for name, found in scores.items()
        }
        return scores, acts


def check_exactly_once(bench, traffic):
    scores, acts = traffic.expected()
    assert {name for name, at in acts.items() if at is not None} >= {"request-0", "request-3", "request-6"}
    verdicts = bench.verdicts()
    told = {name.request_id: telling for name, telling in collect(verdicts).items()}
    assert told.keys() == scores.keys()
    for name, telling in told.items():
        (word,) = telling.last_words
        assert (word.kind, word.point, word.complete, word.end_reason) == ("result", bench.point, True, "finished"), (
            name
        )
        assert (telling.doubled, word.scored, word.missing) == (0, BLOCKS, 0), name
        assert sorted(telling.scores) == [(at, 0) for at in range(BLOCKS)]
        found = np.array([telling.scores[at, 0] for at in range(BLOCKS)], "<u4").view("<f4")
        np.testing.assert_allclose(found, scores[name], rtol=1e-6, atol=1e-6)
    signals = {item.request_id: item.token_pos for item in verdicts if item.kind is VerdictKind.SIGNAL}
    assert len([item for item in verdicts if item.kind is VerdictKind.SIGNAL]) == len(signals)
    assert signals == {name: at for name, at in acts.items() if at is not None}
    ids = {item.command_id for item in verdicts if item.kind is VerdictKind.SIGNAL}
    assert {command.command_id for command in bench.commands()} == ids
    assert {command.point for command in bench.commands()} == {bench.point}
    for point in POINTS:
        assert bench.read(bench.plan.dlq(bench.plan.activations(point))) == []


@pytest.mark.parametrize("assignor", [Assignor.RANGE, Assignor.CONSUMER])
def test_members_that_join_and_die_in_mid_stream_write_each_joined_verdict_once(apache_broker, tmp_path, assignor):
    with make_bench(apache_broker, tmp_path, assignor) as bench:
        config = bench.configure([BINDING])
        traffic = Traffic(bench)
        first = bench.start_host(config)
        traffic.rounds(5)
        bench.wait(bench.verdicts, "verdicts")
        second = bench.start_host(config)

        def both_hold_some():
            beats = {beat.member: beat.partitions for beat in bench.heartbeats()}
            held = list(beats.values())
            return len(held) == 2 and all(held) and sorted(sum(held, ())) == [0, 1, 2]

        bench.wait(both_hold_some, "both members hold numbers of their own", interval_s=0.2)
        traffic.rounds(3)
        assert len(traffic.open) == 2 * len(traffic.rows)
        first.kill()
        traffic.finish()
        bench.wait(lambda: len(bench.last_words()) >= len(traffic.rows), "a result of each request", interval_s=0.3)
        assert second.terminate() == 0, bench.logs()
        check_exactly_once(bench, traffic)


def test_what_cannot_be_joined_is_refused_at_the_start(apache_broker, tmp_path):
    with make_bench(apache_broker, tmp_path, Assignor.RANGE) as bench:
        path = bench.configure([BINDING])
        plan = replace(bench.plan, prefix=f"{bench.plan.prefix}x")
        unequal = [
            replace(topic, partitions=4) if topic.name == plan.activations("attn") else topic for topic in plan.topics()
        ]
        TopicAdmin(bench.settings).create(unequal)
        other = path.with_name("unequal.yaml")
        other.write_text(path.read_text().replace(bench.plan.prefix, plan.prefix))
        sticky = path.with_name("sticky.yaml")
        sticky.write_text(path.read_text().replace("assignor: range", "assignor: cooperative-sticky"))
        hosts = [bench.start_host(config) for config in (other, sticky)]
        assert [host.wait(60.0) for host in hosts] == [1, 2], bench.logs()
        told = bench.logs()
        assert f"{plan.activations('residual')} has 3, {plan.activations('attn')} has 4 partitions" in told
        assert "joining probes need service.assignor: range (or the consumer protocol with the server's" in told


# --- from the prompt to the audit: an engine that captures two points, and a probe that guards by both

ENGINE_WIDTH = 16
STOP_AT = 9
ENGINE_LAYERS = {"residual": (0, 1), "attn": (3,)}
ENGINE_POINTS = [
    ExtractionPoint(name, layers, "residual_stream", "*", execution_mode="async", queue_depth=1024)
    for name, layers in ENGINE_LAYERS.items()
]
PROMPT = "abc"

# It scores what only both points together can tell, and stops a request at one of its tokens.
PROBE = f"""
import numpy as np

from undercurrent.core import Probe, ProbeAction, ProbeResult, ProbeSignal


class Both(Probe):
    probe_kind = "trajectory"

    def on_start(self, ctx):
        self.parts = ctx.stream.parts
        assert [part.point for part in self.parts] == ["residual", "attn"], self.parts

    def on_activation(self, record):
        first, second = (
            np.asarray(record.tensor, np.float64)[part.start : part.stop].reshape(len(part.layers), part.width)
            for part in self.parts
        )
        action = ProbeAction.ABORT if record.token_pos == {STOP_AT} else ProbeAction.CONTINUE
        return ProbeSignal(action, score=float(first[-1] @ second[0]))

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, "seen")
"""


@pytest.fixture
def pipeline(apache_broker, tmp_path):
    folder = tmp_path
    (folder / "both.py").write_text(PROBE)
    with EngineBench(apache_broker.settings(), folder, points=ENGINE_POINTS) as made:
        guards = {"probes": ["both"], "wait_s": 30.0}
        worker = made.start_worker(made.configure(guards=guards))
        binding = {"name": "both", "points": list(ENGINE_LAYERS), "probe": "both:Both", "mode": "abort"}
        made.start_host(made.configure_host(binding))
        worker.wait_ready()
        made.wait(lambda: [beat for beat in made.said(ProbeHeartbeat) if len(beat.partitions) == 2], "a host")
        yield made


def send(bench, name, tokens, points=None):
    sampling = Sampling(max_tokens=tokens)
    bench.send_request(PromptRequest(request_id=name, prompt=PROMPT, points=points, sampling=sampling, created_at_us=0))


def expected(name, tokens):
    """Return what a plain loop says of the tokens that were computed: all but the last."""
    rows = [[activation(name, at, layer, ENGINE_WIDTH) for layer in (1, 3)] for at in range(tokens)]
    return [float(np.float32(first.astype(np.float64) @ second)) for first, second in rows]


def test_a_probe_that_joins_two_points_guards_and_stops_the_requests_that_have_both(pipeline):
    bench = pipeline
    short, long, half = "short", "long", "half"
    send(bench, short, 5)
    send(bench, long, 3000)
    send(bench, half, 5, ("residual",))
    finals = {name: final for name, (final,) in bench.wait_finals([short, long, half]).items()}
    assert {name: final.outcome for name, final in finals.items()} == {
        short: Outcome.COMPLETED, long: Outcome.ABORTED, half: Outcome.COMPLETED,
    }  # fmt: skip
    assert (finals[long].abort.probe, finals[long].abort.token_pos) == ("both", STOP_AT)
    guards = {name: [(guard.probe, guard.state) for guard in final.guards] for name, final in finals.items()}
    assert guards[short] == [("both", GuardState.COMPLETE)]
    assert guards[half] == [("both", GuardState.ABSENT)]
    bench.wait(lambda: {short, long} <= {item.request_id for item in results(bench)}, "a result of each")
    assert {(item.request_id, item.point, item.complete, item.missing) for item in results(bench)} == {
        (name, "residual+attn", True, 0) for name in (short, long)
    }
    scored = [item for item in bench.said(ProbeVerdict) if item.request_id == short and item.scores]
    found = np.concatenate([np.frombuffer(item.scores, "<f4") for item in scored])
    assert found.tolist() == expected(short, len(PROMPT) + 5 - 1)
    assert bench.audit() == []
    looker = Looker(Pipeline(bench.settings, bench.plan.prefix), 60.0)
    status = bench.wait(lambda: (found := looker.look()) and not any(g.lag for g in found.hosts) and found, "no lag")
    assert all(partition.oldest is None for group in status.hosts for partition in group.partitions)
    assert sorted((group.name, group.topic, group.probes) for group in status.hosts) == [
        (f"{bench.plan.prefix}.probes.residual+attn", bench.plan.activations(point), ("both abort",))
        for point in sorted(ENGINE_LAYERS)
    ]


def results(bench):
    return [item for item in bench.said(ProbeVerdict) if item.kind is VerdictKind.RESULT]
