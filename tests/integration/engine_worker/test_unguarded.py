"""What an engine worker does while a real probe host is not there yet, stopped, too far behind, and back."""

from __future__ import annotations

import pytest

from undercurrent.protocol.messages import CommandSource, GuardState, Outcome, PromptRequest, Sampling
from undercurrent.spec import ExtractionPoint, OnUnavailable
from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.engine_bench import EngineBench

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

# One point's requests wait for their guard, the other's are aborted without it.
POINTS = [
    ExtractionPoint(name, 0, "residual_stream", "*", execution_mode="async", queue_depth=1024, on_unavailable=policy)
    for name, policy in [("held", OnUnavailable.HOLD_INTAKE), ("strict", OnUnavailable.ABORT)]
]

# It takes its time while a file says so.
PROBE = """
import time
from pathlib import Path

from undercurrent.core import Probe, ProbeResult


class Slow(Probe):
    probe_kind = "trajectory"

    def __init__(self, flag):
        self._flag = Path(flag)

    def on_start(self, ctx):
        pass

    def on_activation(self, record):
        if self._flag.exists():
            time.sleep(0.003)

    def on_end(self, ctx):
        return ProbeResult(self.request_id, "", "clear")
"""


class Guarded:
    """A pipeline whose points are guarded by the probes of one host."""

    def __init__(self, bench, folder):
        self.bench = bench
        self.folder = folder
        self.slow = folder / "slow"
        (folder / "slowly.py").write_text(PROBE)
        guards = {"probes": ["g-held", "g-strict"], "wait_s": 30.0, "max_lag_s": 1.5}
        self.worker = bench.start_worker(bench.configure(guards=guards))
        flags = {"held": self.slow, "strict": folder / "never"}
        self.host_config = bench.configure_host(
            *(
                {
                    "name": f"g-{point}",
                    "point": point,
                    "probe": "slowly:Slow",
                    "mode": "abort",
                    "args": {"flag": str(flag)},
                }
                for point, flag in flags.items()
            )
        )
        self.hosts = []

    def start_host(self):
        host = AppProcess("probe_consumers", self.host_config, self.folder / f"host-{len(self.hosts)}.log")
        self.hosts.append(host)
        return host

    def send(self, request_id, point, tokens):
        sampling = Sampling(max_tokens=tokens)
        self.bench.send_request(
            PromptRequest(request_id=request_id, prompt="p", points=(point,), sampling=sampling, created_at_us=0)
        )
        return request_id

    def unready(self):
        """Return why the worker is not ready, in words."""
        status, text = self.worker.get("/readyz")
        return "" if status == 200 else text

    def wait_unready(self, *words):
        return self.bench.wait(lambda: all(word in (text := self.unready()) for word in words) and text, f"{words}")

    def wait_ready(self):
        self.bench.wait(lambda: self.worker.ready, f"a worker whose points are guarded; it says {self.unready()}")

    def metric(self, name):
        (line,) = [
            line for line in self.worker.get("/metrics")[1].splitlines() if line.startswith(f"undercurrent_{name} ")
        ]
        return float(line.split()[-1])

    def final(self, request_id):
        try:
            (final,) = self.bench.wait_finals([request_id])[request_id]
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{[host.tail() for host in self.hosts]}") from exc
        return final

    def guard(self, request_id):
        """Return outcome and the state of the guard that its point has."""
        final = self.final(request_id)
        states = {guard.probe: guard.state for guard in final.guards}
        (claim,) = self.bench.starts()[request_id]
        return final.outcome, states[f"g-{claim.points[0]}"]


@pytest.fixture
def guarded(apache_broker, tmp_path):
    with EngineBench(apache_broker.settings(), tmp_path, points=POINTS) as bench:
        made = Guarded(bench, tmp_path)
        try:
            yield made
        finally:
            for host in made.hosts:
                host.close()


def test_a_fleet_that_is_not_there_stopped_behind_and_back(guarded):
    bench = guarded.bench

    # Not there yet.
    guarded.wait_unready("point held is unguarded on partitions 0, 1", "no host has announced it yet", "hold_intake")
    first = guarded.send("first", "held", 8)
    bench.wait(lambda: guarded.metric("engine_requests_held") == 1, "a held prompt")
    assert bench.starts() == {}
    host = guarded.start_host()
    assert guarded.guard(first) == (Outcome.COMPLETED, GuardState.COMPLETE)
    guarded.wait_ready()

    # Stopped: what runs goes on, or is aborted, as its point says; what comes waits, or is aborted.
    going_on, aborted = guarded.send("going-on", "held", 1500), guarded.send("aborted", "strict", 4000)
    bench.wait(lambda: {going_on, aborted} <= bench.between_tokens(), "first tokens")
    assert host.terminate() == 0, host.tail()
    guarded.wait_unready(
        "point held", "new requests that want it wait", "point strict", "are aborted", "not heard of for"
    )
    waiting, refused = guarded.send("waiting", "held", 8), guarded.send("refused", "strict", 8)
    for name, tokens in ((aborted, True), (refused, False)):
        final = guarded.final(name)
        assert (final.outcome, final.abort.source, final.generated_tokens > 0) == (
            Outcome.ABORTED,
            CommandSource.ENGINE,
            tokens,
        )
        assert final.abort.reason.startswith("point strict is unguarded: probe g-strict: not heard of for "), (
            final.abort
        )
    assert guarded.guard(going_on) == (Outcome.COMPLETED, GuardState.ABSENT)
    # The first one, too: it wanted one point, so that the guard of the other did not see it.
    bench.wait(lambda: guarded.metric('requests_unguarded_total{state="absent"}') == 2, "it to be counted")
    assert guarded.metric('engine_intake_paused{reason="unguarded"}') == 1
    assert waiting not in bench.starts()

    # Back: what waited runs, and is guarded.
    guarded.start_host()
    assert guarded.guard(waiting) == (Outcome.COMPLETED, GuardState.COMPLETE)
    guarded.wait_ready()
    assert [guarded.metric(f'engine_point_unguarded{{point="{name}"}}') for name in ("held", "strict")] == [0, 0]

    # Behind: only the requests of the point whose guard is behind wait.
    guarded.slow.touch()
    load = [guarded.send(f"load-{number}", "held", 4000) for number in range(8)]
    guarded.wait_unready("point held", "s behind; 1.5 s are too many")
    other = guarded.send("other", "strict", 8)
    assert guarded.guard(other) == (Outcome.COMPLETED, GuardState.COMPLETE)
    behind = guarded.send("behind", "held", 8)
    bench.wait(lambda: guarded.metric("engine_requests_held") == 1, "a held prompt")
    for name in load:
        bench.abort(name)
    guarded.slow.unlink()
    assert guarded.guard(behind) == (Outcome.COMPLETED, GuardState.COMPLETE)
    guarded.wait_ready()

    log = guarded.worker.log.read_text()
    counts = {
        point: (log.count(f"point {point} is unguarded"), log.count(f"point {point} is guarded again"))
        for point in ("held", "strict")
    }
    # Told when it changes, however often it is looked. A host that starts slowly may come and go once more.
    for point, least in (("held", 2), ("strict", 1)):
        told, ended = counts[point]
        assert least <= told == ended < 10, log
    assert guarded.worker.terminate() == 0, guarded.worker.tail()
