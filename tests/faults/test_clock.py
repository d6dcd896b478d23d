"""Workers and hosts whose clock is two hours ahead of the broker's and of everybody else's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.ring_world import QUICK, RingWorld
from undercurrent.protocol.messages import ControlCommand

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]

AHEAD_S = 7200


@pytest.fixture(scope="module")
def ahead(tmp_path_factory) -> dict[str, str]:
    """Environment of a process whose wall clock is two hours ahead."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("another clock is preloaded, which needs Linux and a C compiler (cc)")
    built = tmp_path_factory.mktemp("clock") / "shifted_clock.so"
    source = Path(__file__).with_name("shifted_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", built, source, "-ldl"], check=True, timeout=60)
    environment = {"LD_PRELOAD": str(built), "SHIFTED_CLOCK_S": str(AHEAD_S)}
    shown = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"],
        env=os.environ | environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert float(shown.stdout) - time.time() == pytest.approx(AHEAD_S, abs=120)
    return environment


def test_a_clock_that_is_two_hours_ahead_costs_nothing(patient_broker, tmp_path, ahead):
    with RingWorld(patient_broker.settings(**QUICK), tmp_path, seed=51, tokens=(200, 400)) as world:
        world.start_worker("engine-0", ahead)
        world.start_host("host-0", ahead)
        world.workers["engine-0"].wait_ready()
        world.send(8)
        world.under_way()
        # Others whose clocks are right take over in the middle.
        world.workers["engine-0"].kill()
        world.hosts["host-0"].kill()
        world.start_worker("engine-0")
        world.start_host("host-0")
        world.send(4)
        world.settle()
        # And the other way round.
        world.start_worker("engine-1", ahead)
        world.start_host("host-1", ahead)
        assert world.workers["engine-0"].terminate() == 0
        assert world.hosts["host-0"].terminate() == 0
        del world.workers["engine-0"], world.hosts["host-0"]
        hot = {asked.request_id for asked in world.send(8) if asked.acts_at("guard") is not None}
        world.settle()
        world.stop()
        world.check()
        # A guard goes by the age of a record: by the broker's clock, not by its own.
        commands = [m for _, m in world.bench.messages(world.bench.plan.control) if isinstance(m, ControlCommand)]
        assert hot
        assert hot <= {command.request_id for command in commands}
