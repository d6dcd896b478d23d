"""An engine ends with the process that drives it, though nobody tells it."""

import os
import signal
import subprocess
import sys

import psutil

from undercurrent.testing.waiting import wait_until

# An owner starts a core, the core a worker that watches the owner; each says its id and then waits for ever.
IMPORT = "import os, subprocess, sys, time; "
WAIT = "time.sleep(600)"
WORKER = (
    f"{IMPORT}from undercurrent.adapters.vllm.orphan import end_with; "
    f"end_with(int(sys.argv[1])); print('up', flush=True); {WAIT}"
)
CORE = f"{IMPORT}subprocess.Popen([sys.executable, '-c', {WORKER!r}, sys.argv[1]]); {WAIT}"
OWNER = f"{IMPORT}subprocess.Popen([sys.executable, '-c', {CORE!r}, str(os.getpid())]); {WAIT}"


def test_a_killed_owner_takes_core_and_worker_along():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        below = psutil.Process(owner.pid).children(recursive=True)
        try:
            assert len(below) == 2
            os.kill(owner.pid, signal.SIGKILL)
            assert psutil.wait_procs(below, timeout=20)[1] == []
        finally:
            for process in below:
                if process.is_running():
                    process.kill()


def test_an_owner_that_is_gone_already_ends_the_worker_at_once():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    with subprocess.Popen([sys.executable, "-c", CORE, str(gone.pid)], stdout=subprocess.PIPE) as core:
        try:
            wait_until(lambda: core.poll() is not None, 30, "the core's end")
        finally:
            core.kill()
    assert core.returncode == -signal.SIGKILL
