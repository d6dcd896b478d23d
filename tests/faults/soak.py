"""The storms of the fault suite for as long as one wants, each on topics of its own, with what came of them.

    python -m tests.faults.soak --minutes 60 [--seed 1] [--out soak.json]

Each round takes the next seed: it chooses the group protocol, whether the broker is hit too or half of the ring lies
behind a network that is cut, and the faults. A round of about a minute ends with the same comparison as in the tests:
by ids, with what a plain loop over the seed says. The first round that breaks the promise ends the run with its seed,
its folder and what is wrong. Every round's figures are printed and saved.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.faults.ring_world import QUICK, RingWorld
from tests.faults.storm import Storm
from undercurrent.kafka.client import Assignor
from undercurrent.testing.brokers import Broker
from undercurrent.testing.cut_proxy import CutProxy, cuttable_kafka

ROUND_S = 45.0


def play(seed: int, broker: Broker, network: CutProxy, folder: Path) -> Counter[str]:
    """Play one storm and return its figures.

    Raises:
        AssertionError: the promise is broken; the message says of which request and how.
        TimeoutError: an answer never came.
    """
    rng = random.Random(seed)
    assignor = rng.choice([Assignor.COOPERATIVE_STICKY, Assignor.CONSUMER])
    options = QUICK if assignor is Assignor.COOPERATIVE_STICKY else {}
    hits_broker = rng.random() < 0.5
    with RingWorld(broker.settings(**options), folder, seed=seed, assignor=assignor, partitions=4) as world:
        far = None if hits_broker else network.settings(**options)
        for number, way in enumerate((None, far)):
            world.start_worker(f"engine-{number}", kafka=way)
            world.start_host(f"host-{number}", kafka=way)
        for worker in world.workers.values():
            worker.wait_ready()
        storm = Storm(world, rng, broker if hits_broker else None, None if hits_broker else network)
        storm.run(ROUND_S)
        world.settle(180.0)
        world.stop()
        figures = world.check(lossless=False, may_die=True, may_lose_streams=True)
    figures[f"rounds {assignor}"] += 1
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Play rounds until the time is over; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--out", type=Path, default=Path("soak.json"), help="takes the figures")
    given = parser.parse_args(arguments)
    began, total, rounds, wrong = time.monotonic(), Counter[str](), 0, ""
    with ExitStack() as stack:
        # Frozen beyond its session with the controller a single node says that there is no broker, and who sends the
        # prompts has no way out of that.
        patient = {"broker.session.timeout.ms": "9000"}
        broker, networks = stack.enter_context(cuttable_kafka("far", properties=patient))
        while time.monotonic() - began < 60.0 * given.minutes and not wrong:
            seed = given.seed + rounds
            folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
            try:
                figures = play(seed, broker, networks["far"], folder)
            except (AssertionError, TimeoutError) as exc:
                wrong = f"seed {seed}, {folder}: {type(exc).__name__} {exc}"
                traceback.print_exc()
                break
            shutil.rmtree(folder)
            rounds += 1
            total += figures
            print(f"{(time.monotonic() - began) / 60:6.1f} min  seed {seed}: {_told(figures)}", flush=True)
    summary = {"rounds": rounds, "minutes": round((time.monotonic() - began) / 60, 1), "wrong": wrong, **total}
    given.out.write_text(json.dumps(summary, indent=2, sort_keys=True) + "\n")
    print(wrong or f"{rounds} rounds: nothing lost, nothing doubled, nothing hidden")
    print(json.dumps(summary, sort_keys=True))
    return 1 if wrong or not rounds else 0


def _told(figures: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(figures.items()))


if __name__ == "__main__":
    sys.exit(main())
