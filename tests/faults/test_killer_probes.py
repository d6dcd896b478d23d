"""A probe that never comes back: the record is found, the host lives, and every other stream is judged."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from probe_consumers.watchdog import EXIT_CODE
from undercurrent.evaluation.diff import collect
from undercurrent.kafka.client import Assignor
from undercurrent.protocol.messages import VerdictKind
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.streams import StreamBuilder

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]

# Whoever is killed has to be missed before somebody else gets its partitions.
MISSED_SOON = {"session.timeout.ms": 1500, "heartbeat.interval.ms": 300}
KILLER = "killer"
AT = 2
PROBES = f"""
from undercurrent.core import Probe, ProbeResult


class Loops(Probe):
    def on_activation(self, record):
        while record.request_id == {KILLER!r} and record.token_pos == {AT}:
            pass

    def on_end(self, ctx):
        return ProbeResult(ctx.request_id, self.extraction_point_name, "harmless")
"""


def test_the_record_that_no_host_comes_back_from_is_quarantined(patient_broker, tmp_path):
    (tmp_path / "killing_probes.py").write_text(PROBES)
    settings = patient_broker.settings(**MISSED_SOON)
    with ProbeBench(settings, tmp_path, assignor=Assignor.COOPERATIVE_STICKY, partitions=1) as bench:
        bench.save_linear("first", [1.0, 0.0, 0.0, 0.0], threshold=1e9)
        bindings = [
            {"name": "first", "point": "residual", "probe": "./first"},
            {"name": "harm", "point": "residual", "probe": "killing_probes:Loops"},
        ]
        config = bench.configure(bindings, stuck_after_s=2)
        environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
        place, killing, expected = write_streams(bench)
        deaths = []
        host = bench.start_host(config, environment)

        def told():
            nonlocal host
            if not host.running:
                deaths.append(host.wait())
                host = bench.start_host(config, environment)
            return len(bench.last_words()) >= 2 * (1 + len(expected))

        bench.wait(told, "the last word on every stream", 120, interval_s=0.3)
        assert set(deaths) == {EXIT_CODE}, bench.logs()
        # It goes on, and what comes next is judged.
        late = StreamBuilder("late")
        bench.write(late.key, [late.start(), late.block([0], np.ones((1, 1, 4))), late.end()])
        bench.wait(lambda: {"late"} == {w.request_id for w in bench.last_words()} - expected.keys() - {KILLER}, "late")
        assert host.terminate() == 0, bench.logs()

        (letter,) = bench.dead_letters()
        headers = dict(letter.headers)
        assert (letter.value, headers["undercurrent.cause"]) == (killing, b"quarantined")
        assert int(headers["undercurrent.offset"]) == place
        words = Counter((word.request_id, word.probe, word.kind) for word in bench.last_words())
        kinds = {KILLER: VerdictKind.ERROR}
        assert words == {
            (name, probe, kinds.get(name, VerdictKind.RESULT)): 1
            for name in (KILLER, "late", *expected)
            for probe in ("first", "harm")
        }
        for name, telling in collect(bench.verdicts()).items():
            if name.request_id in expected and name.probe == "first":
                (word,) = telling.last_words
                assert (word.complete, telling.doubled) == (True, 0)
                found = {at: bits for (at, _), bits in telling.scores.items()}
                assert found == {at: int(np.float32(v).view(np.uint32)) for at, v in expected[name.request_id].items()}


def write_streams(bench, rows=6):
    """Write four streams beside the one that kills, all of them under way when it does.

    Returns:
        The offset of the record that kills, its bytes, and the scores of the others by position.
    """
    streams = {name: StreamBuilder(name) for name in ("a", "b", KILLER, "c", "d")}
    expected = {name: {} for name in streams if name != KILLER}
    written, place, killing = 0, -1, b""
    for at in range(-1, rows + 1):
        for number, (name, stream) in enumerate(streams.items()):
            value = number + at / 8
            if at == -1:
                record = stream.start()
            elif at == rows:
                record = stream.end()
            else:
                record = stream.block([at], [[[value, 0, 0, 0]]])
                if name == KILLER and at == AT:
                    place, killing = written, record
                elif name != KILLER:
                    expected[name][at] = value
            bench.write(stream.key, [record], partition=0)
            written += 1
    return place, killing, expected
