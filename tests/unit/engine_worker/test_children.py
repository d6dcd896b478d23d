"""The processes below one are found and ended."""

from __future__ import annotations

import subprocess
import sys

import psutil

_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
grandchild = subprocess.Popen(
    [sys.executable, "-c",
     "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
     "print(p.pid, flush=True); p.wait()"],
    stdout=subprocess.PIPE, text=True)
below = int(grandchild.stdout.readline())
from engine_worker.children import kill_descendants
killed = kill_descendants()
child.wait(), grandchild.wait()
print(sorted(killed) == sorted([child.pid, grandchild.pid, below]), below)
"""


def test_descendants_of_every_depth_are_killed():
    done = subprocess.run([sys.executable, "-c", _PARENT], capture_output=True, text=True, timeout=60, check=True)
    found, below = done.stdout.split()
    assert found == "True"
    assert not psutil.pid_exists(int(below)) or psutil.Process(int(below)).status() == psutil.STATUS_ZOMBIE
