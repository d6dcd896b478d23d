"""Probes that fail and streams that do not fit them: an error for the one that it concerns, and for nobody else."""

from __future__ import annotations

import numpy as np
import pytest

from probe_consumers.bound import Bound
from tests.unit.probe_consumers.runner_doubles import POINT, Log, linear, python, rows, scores_of
from undercurrent.core import Probe, ProbeAction, ProbeFactory, ProbeResult, ProbeSignal
from undercurrent.probes import Binding, LinearProbe, LoadedProbe
from undercurrent.protocol.messages import VerdictKind
from undercurrent.testing.streams import StreamBuilder


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_value_that_is_not_finite_is_an_error_for_that_request_alone(value, dtype):
    class Quiet(Probe):
        def on_activation(self, record):
            return None

        def on_end(self, ctx):
            return ProbeResult(self.request_id, POINT, "fine")

    log = Log(linear(threshold=9), python(Quiet))
    bad, good = StreamBuilder("bad", dtype=dtype), StreamBuilder("good", dtype=dtype)
    log.append(
        bad.start(), good.start(), bad.block([0], rows(value)), good.block([0], rows(0.5)), bad.end(), good.end()
    )
    found = log.verdicts(VerdictKind.ERROR, VerdictKind.RESULT)
    assert [(item.request_id, item.probe, item.kind) for item in found] == [
        ("bad", "guard", "error"),
        ("bad", "code", "error"),
        ("good", "guard", "result"),
        ("good", "code", "result"),
    ]
    assert all("not finite" in item.error for item in found[:2])


def test_a_probe_that_raises_ends_as_one_error_for_that_request_alone():
    class Picky(Probe):
        def on_activation(self, record):
            if record.request_id == "bad" and record.token_pos == 1:
                raise KeyError("boom")
            return ProbeSignal(score=float(record.tensor[0]))

        def on_end(self, ctx):
            return ProbeResult(self.request_id, POINT, "done", metadata={"score": 3})

    log, bad, good = Log(python(Picky)), StreamBuilder("bad"), StreamBuilder("good")
    for stream in (bad, good):
        log.append(stream.start(), stream.block([0, 1], rows(1, 2)), stream.block([2], rows(3)), stream.end())
    found = log.verdicts()
    assert [(item.request_id, item.kind) for item in found] == [
        ("bad", "error"),
        ("good", "watermark"),
        ("good", "result"),
    ]
    assert found[0].error == "KeyError: 'boom'"
    assert scores_of([found[1]]) == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert (found[2].verdict, found[2].score) == ("done", 3.0)


def test_a_batch_score_that_raises_fails_the_guilty_stream_alone():
    class Fussy(LinearProbe):
        def score(self, rows):
            if (np.asarray(rows, np.float32)[:, 1] > 0).any():
                raise RuntimeError("cannot")
            return super().score(rows)

    probe = Fussy(linear(threshold=9).loaded.sample.artefact)
    loaded = LoadedProbe(factory=ProbeFactory(Fussy, {"artefact": probe.artefact}), sample=probe, fingerprint="f")
    log = Log(Bound(Binding(name="guard", point=POINT, probe="p"), loaded))
    bad, good = StreamBuilder("bad"), StreamBuilder("good")
    log.append(
        bad.start(), good.start(), good.block([0], rows(0.5)), bad.block([0], [0, 1, 0, 0]), bad.end(), good.end()
    )
    found = log.verdicts(VerdictKind.ERROR, VerdictKind.RESULT)
    assert [(item.request_id, item.kind) for item in found] == [("bad", "error"), ("good", "result")]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"layers": (1,)}, "layer 0"),
        ({"width": 5}, "width 4"),
        ({"tensor_type": "mlp_out"}, "tensor_type"),
        ({"model_fingerprint": "other"}, "model_fingerprint"),
    ],
)
def test_a_stream_that_the_probe_was_not_fitted_for_is_refused_before_the_first_score(wrong, named):
    log = Log(linear(fingerprints={"model": "mine"}))
    fields = {"model_fingerprint": "mine", **wrong}
    stream = StreamBuilder("r", **fields)
    log.append(stream.start(), stream.block([0], np.zeros((1, 1, stream.width))), stream.end())
    [refused] = log.verdicts()
    assert (refused.kind, refused.source_offset) == (VerdictKind.ERROR, 0)
    assert named in refused.error
    assert named in log.runner.refusals["guard"]
    taken = StreamBuilder("s", model_fingerprint="mine")
    log.append(taken.start())
    assert log.runner.refusals == {}


def test_a_probe_that_returns_nonsense_is_an_error_not_a_crash():
    class Odd(Probe):
        def on_activation(self, record):
            return ProbeSignal(ProbeAction.FLAG, token_pos="seven")

        def on_end(self, ctx):
            return None

    log, stream, empty = Log(python(Odd)), StreamBuilder("r"), StreamBuilder("s")
    log.append(stream.start(), stream.block([0], rows(0)), stream.end(), empty.start(), empty.end())
    assert [item.kind for item in log.verdicts()] == ["error", "error"]
