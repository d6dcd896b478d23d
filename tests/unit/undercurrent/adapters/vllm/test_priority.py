"""Lowering the priority of processes that run already."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from undercurrent.adapters.vllm.priority import lower

PARENT_WITH_A_THREAD_AND_A_CHILD = """
import subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
"""


@pytest.mark.timeout(60)
def test_every_thread_of_a_process_and_of_its_children_gets_the_lower_priority() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = min(19, own + 7)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT_WITH_A_THREAD_AND_A_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        lower([parent.pid], wanted)
        threads = [t.id for pid in (parent.pid, child) for t in psutil.Process(pid).threads()]
        found = [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]
        parent.communicate(timeout=30)
    assert len(threads) >= 3
    assert set(found) == {wanted}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_process_that_has_ended_is_left_out() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(timeout=30)
    lower([process.pid], 5)


@pytest.mark.timeout(60)
def test_a_thread_that_starts_others_can_be_left_as_it_is() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT_WITH_A_THREAD_AND_A_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        spared = next(t.id for t in psutil.Process(parent.pid).threads() if t.id != parent.pid)
        lower([parent.pid], min(19, own + 7), spare={spared})
        found = [os.getpriority(os.PRIO_PROCESS, thread) for thread in (spared, parent.pid)]
        parent.communicate(timeout=30)
    assert found == [own, min(19, own + 7)]


def _terminal_of_its_own() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not group by session")
@pytest.mark.parametrize(("enter", "lowered"), [(os.setsid, True), (_terminal_of_its_own, False)])
def test_a_session_is_lowered_unless_it_is_a_terminals(enter: Callable[[], None], *, lowered: bool) -> None:
    def group() -> str:
        return Path(f"/proc/{process.pid}/autogroup").read_text(encoding="ascii").split("nice")[1].strip()

    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "print(1, flush=True); input()"]
    try:
        with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, preexec_fn=enter) as process:
            assert process.stdout is not None
            process.stdout.readline()
            before = group()
            lower([process.pid], 7)
            found = group()
            os.write(ours, b"\n")
            process.wait(timeout=30)
    finally:
        os.close(ours)
        os.close(theirs)
    assert before == "0"
    assert found == ("7" if lowered else "0")
