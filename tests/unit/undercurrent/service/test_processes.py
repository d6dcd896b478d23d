from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from undercurrent.service.processes import StopRequest, tied_command
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
