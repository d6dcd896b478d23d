"""A process that ends as soon as its work is over."""

import subprocess
import sys
import textwrap

import pytest

HEAD = """
import atexit, sys, time
from undercurrent.adapters.vllm.owned import run_and_leave

class SlowToFree:
    def __del__(self):
        time.sleep(600)

slow = SlowToFree()

def main(how):
    atexit.register(print, "cleaned up")
    print("worked")
    exec(how)

run_and_leave(main, {how!r})
"""


def run(how):
    script = textwrap.dedent(HEAD).replace("{how!r}", repr(how))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("pass", 0),
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('in words')", 1),
        ("1 / 0", 1),
    ],
)
def test_it_cleans_up_and_leaves_with_its_code_without_freeing_what_it_has(how, code):
    done = run(how)
    assert (done.returncode, done.stdout.splitlines()) == (code, ["worked", "cleaned up"])
    assert ("ZeroDivisionError" in done.stderr) == ("/" in how)


def test_what_is_replaced_is_replaced_once_and_its_own_is_kept():
    from undercurrent.adapters.vllm import owned

    class Core:
        @staticmethod
        def run(number):
            return number

    def other(number):
        return owned._original(Core, "run")(number) + 100

    assert owned._original(Core, "run")(1) == 1
    owned._replace(Core, "run", other)
    owned._replace(Core, "run", other)
    assert (Core.run(1), owned._original(Core, "run")(1)) == (101, 1)
