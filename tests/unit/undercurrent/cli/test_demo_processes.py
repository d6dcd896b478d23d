"""Whatever happens to a demo, nothing that it started stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from undercurrent.cli.demo.processes import Processes, ProcessFailedError, last_lines

# Starts a grandchild in a session of its own that ignores SIGTERM, says its pid, and outlives its parent if it may.
STUBBORN = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
    start_new_session=True,
)
print(child.pid, flush=True)
time.sleep(600)
"""

DEMO = """
import sys, time
from pathlib import Path
from undercurrent.cli.demo.processes import Processes
with Processes(Path(sys.argv[1])) as processes:
    processes.start("stubborn", [sys.executable, "-c", sys.argv[2]])
    print("up", flush=True)
    time.sleep(600)
"""


def until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing of the kind happened in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def grandchild(log: Path) -> int:
    until(lambda: bool(last_lines(log)))
    return int(last_lines(log)[0])


def test_exit_codes_and_output_of_a_process_are_found(tmp_path: Path) -> None:
    with Processes(tmp_path, env={"WORD": "tide"}) as processes:
        processes.start("one", [sys.executable, "-c", "import os; print(os.environ['WORD']); raise SystemExit(3)"])
        assert processes.wait("one", 30) == 3
        assert last_lines(processes.log("one")) == ["tide"]
        with pytest.raises(ProcessFailedError, match=r"one: ended early, exit code 3") as caught:
            processes.check("one")
    assert caught.value.last_lines() == ["tide"]


def test_what_cannot_be_executed_is_named(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes, pytest.raises(ProcessFailedError, match="ghost: cannot be started"):
        processes.start("ghost", ["/nowhere/ghost"])


def test_stop_is_a_polite_request(tmp_path: Path) -> None:
    program = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); signal.pause()"
    with Processes(tmp_path) as processes:
        processes.start("polite", [sys.executable, "-c", program])
        until(lambda: last_lines(processes.log("polite")) == ["up"])
        assert processes.code("polite") is None
        assert processes.stop("polite", 30) == 7


def test_a_process_that_does_not_end_in_time_is_named(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("slow", [sys.executable, "-c", "import time; time.sleep(600)"])
        with pytest.raises(ProcessFailedError, match=r"slow: still runs after 0\.2 s"):
            processes.wait("slow", 0.2)


def test_an_orphan_that_ignores_sigterm_in_another_session_ends_with_the_context(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        parent = processes.start("stubborn", [sys.executable, "-c", STUBBORN])
        child = grandchild(processes.log("stubborn"))
        os.kill(parent, signal.SIGKILL)
        assert processes.wait("stubborn", 30) == -signal.SIGKILL
        assert alive(child)
    assert not alive(child)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_demo_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-c", DEMO, str(tmp_path), STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert demo.stdout is not None
    with demo.stdout:
        assert demo.stdout.readline() == b"up\n"
        child = grandchild(tmp_path / "stubborn.log")
        tree = {process.pid for process in psutil.Process(demo.pid).children(recursive=True)}
        assert child in tree
        demo.send_signal(number)
        demo.wait(30)
    until(lambda: not any(alive(pid) for pid in tree))


def test_a_second_interrupt_does_not_wait_for_goodbyes(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
    processes = Processes(tmp_path)
    with processes:
        pid = processes.start("deaf", [sys.executable, "-c", deaf])
        until(lambda: last_lines(processes.log("deaf")) == ["up"])
        started = time.monotonic()
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            processes.close()
    assert not alive(pid)
    assert time.monotonic() - started < 5.0


def test_temporary_files_have_a_short_path_and_are_removed(tmp_path: Path) -> None:
    with Processes(tmp_path / ("long" * 30)) as processes:
        processes.start("one", [sys.executable, "-c", "import tempfile; print(tempfile.mkstemp()[1])"])
        assert processes.wait("one", 30) == 0
        made = Path(last_lines(processes.log("one"))[0])
        assert made.exists()
        assert len(str(made.parent / "e2b44fc0-b44c-4603-97fa-92b6ff159111")) < 107
    assert not made.parent.exists()


def test_a_killed_keeper_takes_its_children_along(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        pid = processes.start("one", [sys.executable, "-c", "import time; time.sleep(600)"])
        keeper = psutil.Process(pid).parent()
        assert keeper is not None
        keeper.kill()
        until(lambda: not alive(pid))
        with pytest.raises(ProcessFailedError, match="keeper"):
            processes.wait("one", 5)


def test_reports_of_the_keeper_are_json_lines(tmp_path: Path) -> None:
    order = {"start": "one", "argv": ["true"], "env": {}, "cwd": str(tmp_path), "log": str(tmp_path / "one.log")}
    with subprocess.Popen(
        [sys.executable, "-m", "undercurrent.cli.demo.keeper"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        keeper.stdin.write(json.dumps(order).encode() + b"\n")
        keeper.stdin.flush()
        assert set(json.loads(keeper.stdout.readline())) == {"started", "pid"}
        assert json.loads(keeper.stdout.readline()) == {"exited": "one", "code": 0}
        keeper.stdin.close()
        assert keeper.wait(30) == 0
