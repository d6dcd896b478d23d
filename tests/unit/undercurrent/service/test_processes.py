from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator

import psutil
import pytest

from undercurrent.service.processes import StopRequest, spare_collector, tied_command
from undercurrent.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

_PARENT = """
import subprocess, sys
from undercurrent.service.processes import tied_command
child = subprocess.Popen(tied_command([sys.executable, "-c", "import time; time.sleep(600)"]))
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_dies_with_its_parent_however_that_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: "time.sleep(600)" in " ".join(child.cmdline()[-1:]), 20.0, "the child's start")
        parent.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 10.0, "the child's end")


def test_the_command_keeps_its_arguments_and_exit_code() -> None:
    done = subprocess.run(
        tied_command([sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b", "$c"]),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "['a b', '$c']\n")


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield StopRequest().install()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_stop(stop: StopRequest, number: signal.Signals) -> None:
    assert not stop.is_set()
    os.kill(os.getpid(), number)
    assert stop.wait(5.0)
    assert stop.signal_name == number.name


def test_the_second_signal_ends_the_process() -> None:
    code = (
        "import os, signal\n"
        "from undercurrent.service.processes import StopRequest\n"
        "StopRequest().install()\n"
        "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert done.returncode == -signal.SIGTERM


TAKE_AND_FREE = """
import resource, sys
from undercurrent.service.processes import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory(64 << 20)
for turn in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [bytes([turn]) * int(sys.argv[2]) for _ in range((16 << 20) // int(sys.argv[2]))]
    del taken
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("size", [8 << 10, 1 << 20])
def test_memory_that_is_freed_stays_where_it_is_wanted_again(size):
    command = [sys.executable, "-c", TAKE_AND_FREE, "keep", str(size)]
    faults = int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    # 16 MiB are 4,096 pages.
    assert faults < 300


def test_memory_that_is_freed_goes_where_nobody_asks_for_it():
    command = [sys.executable, "-c", TAKE_AND_FREE, "give", str(8 << 10)]
    assert int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout) > 3_000


class Knot:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def looks() -> Iterator[list[int]]:
    seen: list[int] = []
    before = gc.get_threshold()
    spare_collector()
    gc.callbacks.append(lambda phase, facts: seen.append(facts["generation"]) if phase == "stop" else None)
    yield seen
    gc.callbacks.pop()
    gc.unfreeze()
    gc.set_threshold(*before)


def test_a_batch_is_not_looked_at_while_it_is_worked_on(looks: list[int]) -> None:
    for _ in range(20):
        batch = [[number] for number in range(20_000)]
        del batch
    assert looks == []


def test_what_holds_itself_is_found(looks: list[int]) -> None:
    first = weakref.ref(Knot())
    for _ in range(100_000):
        Knot()
    assert first() is None
    assert looks
