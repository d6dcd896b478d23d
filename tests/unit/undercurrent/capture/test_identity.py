from __future__ import annotations

import os
import subprocess
import sys

import pytest

from undercurrent.capture.identity import is_alive, mark_of, own_mark, pid_of
from undercurrent.capture.ring import Ring
from undercurrent.errors import RingError

OTHER_START = 1 << 22


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as made:
        yield made
        made.kill()


def test_a_mark_names_a_process_for_as_long_as_it_runs(process):
    mark = mark_of(process.pid)
    assert (pid_of(mark), is_alive(mark)) == (process.pid, True)
    assert own_mark() == mark_of(os.getpid()) != mark
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(mark), "it has ended, and nobody has asked how"
    process.wait(10)
    assert not is_alive(mark)
    assert mark_of(process.pid) == 0


def test_another_process_of_the_same_number_is_another(process):
    assert not is_alive(mark_of(process.pid) + OTHER_START)
    assert is_alive(process.pid), "a mark without a start is the number's"


def test_marks_fit_a_signed_word():
    assert 0 < own_mark() < 1 << 63


def test_a_side_of_a_ring_whose_holder_s_number_is_another_process_s_is_free(process):
    ring = Ring.create(4096)
    mark = mark_of(process.pid)
    ring.reader()
    number = list(ring.words).index(own_mark())
    ring.words[number] = mark
    with pytest.raises(RingError, match=f"process {process.pid} is already the reader"):
        ring.reader()
    ring.words[number] = mark + OTHER_START
    ring.reader()
    assert ring.stats().reader_pid == os.getpid()
    ring.close()
