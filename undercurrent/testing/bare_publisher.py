"""The publisher process of a bare server without the server: a ring into which nobody writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from undercurrent.adapters.vllm.sidecar import MODULE, SidecarStart
from undercurrent.capture.ring import Ring


@contextmanager
def bare_publisher(config: Path, engine: str, log: Path) -> Iterator[None]:
    """Run one; it ends with the block, by the end of its standard input.

    Args:
        config: the server's file.
        engine: its name.
        log: gets what it prints.
    """
    ring = Ring.create(1 << 20)
    start = SidecarStart(
        settings=str(config),
        ring=ring.path,
        engine=engine,
        model="m",
        folder="",
        owner_pid=os.getpid(),
        cpus=tuple(os.sched_getaffinity(0)),
    )
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", MODULE, str(write_fd)]
    with log.open("ab") as out, os.fdopen(read_fd) as said:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(write_fd,), stdout=out, stderr=out)
        os.close(write_fd)
        try:
            assert process.stdin is not None  # noqa: S101 - asked for above
            process.stdin.write(start.to_json().encode() + b"\n")
            process.stdin.flush()
            if said.readline() != '{"ready": true}\n':
                raise AssertionError(f"the publisher cannot start:\n{log.read_text()}")
            yield
        finally:
            process.communicate()
            # To the end of its own word: it has left our family, and writes what the ring holds first.
            said.read()
            ring.close()
