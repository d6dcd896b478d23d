"""An engine ends with the process that drives it, though nobody tells it."""

import os
import signal
import subprocess
import sys

import psutil

# An owner starts a core, the core a worker; both watch the owner, say that they are up, and then wait for ever.
IMPORT = "import os, subprocess, sys, time; from undercurrent.adapters.vllm.orphan import end_with; "
WATCH = "end_with(int(sys.argv[1])); print('up', flush=True); time.sleep(600)"
WORKER = IMPORT + WATCH
CORE = f"{IMPORT}subprocess.Popen([sys.executable, '-c', {WORKER!r}, sys.argv[1]]); {WATCH}"
OWNER = f"{IMPORT}subprocess.Popen([sys.executable, '-c', {CORE!r}, str(os.getpid())]); time.sleep(600)"


def test_a_killed_owner_takes_core_and_worker_along():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert [owner.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        below = psutil.Process(owner.pid).children(recursive=True)
        try:
            assert len(below) == 2
            os.kill(owner.pid, signal.SIGKILL)
            assert psutil.wait_procs(below, timeout=20)[1] == []
        finally:
            for process in below:
                if process.is_running():
                    process.kill()


def test_an_owner_that_is_gone_already_ends_the_process_at_once_and_no_other():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    # Whoever started it, or took it over, is not the owner.
    parent = f"import subprocess, sys; sys.exit(-subprocess.call([sys.executable, '-c', {WORKER!r}, sys.argv[1]]))"
    ended = subprocess.run([sys.executable, "-c", parent, str(gone.pid)], timeout=60, check=False)
    assert ended.returncode == signal.SIGKILL
