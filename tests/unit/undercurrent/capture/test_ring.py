"""The ring: order, wrap, back-pressure, corruption, two processes."""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercurrent.capture.ring import Ring
from undercurrent.errors import RingError


@pytest.fixture
def ring():
    ring = Ring.create(8192, control_reserve=1024)
    yield ring
    ring.close()


def write(writer, kind, payload):
    at = writer.reserve(kind, len(payload))
    if at >= 0:
        writer.data[at : at + len(payload)] = payload
    return at >= 0


def drain(reader):
    out = [(frame.kind, bytes(frame.payload)) for frame in reader.read()]
    reader.release()
    return out


def test_frames_come_out_in_order_and_only_after_commit(ring):
    writer, reader = ring.writer(), ring.reader()
    assert write(writer, 2, b"one")
    assert write(writer, 3, b"two")
    assert drain(reader) == []
    writer.commit()
    assert drain(reader) == [(2, b"one"), (3, b"two")]
    assert drain(reader) == []


def test_rollback_forgets_data_and_keeps_controls(ring):
    writer, reader = ring.writer(), ring.reader()
    writer.put_control(1, b"before")
    assert write(writer, 2, b"lost")
    writer.put_control(4, b"during")
    writer.rollback()
    assert write(writer, 2, b"kept")
    writer.commit()
    assert drain(reader) == [(1, b"before"), (4, b"during"), (2, b"kept")]


def test_payloads_start_so_that_a_64_byte_line_can_follow_their_head(ring):
    writer = ring.writer()
    for size in (1, 63, 64, 200):
        assert writer.reserve(2, size) % 64 == 16


def test_data_leaves_the_reserve_to_controls_and_controls_beyond_it_wait_in_order(ring):
    writer, reader = ring.writer(), ring.reader()
    written = 0
    while write(writer, 2, bytes(100)):
        written += 1
    writer.commit()
    assert ring.stats().full_events == 1
    assert ring.stats().used_bytes <= ring.capacity - ring.control_reserve
    sent = [b"control %d" % i for i in range(40)]
    for payload in sent:
        writer.put_control(4, payload)
    assert ring.stats().pending_controls > 0
    assert not write(writer, 2, b"must not overtake")
    first = drain(reader)
    assert len([f for f in first if f[0] == 2]) == written
    assert write(writer, 2, b"after")
    writer.commit()
    assert [p for k, p in first + drain(reader) if k == 4 or p == b"after"] == [*sent, b"after"]
    assert ring.stats().pending_controls == 0


def test_the_largest_payload_fits_wherever_the_head_stands(ring):
    writer, reader = ring.writer(), ring.reader()
    for step in range(200):
        assert write(writer, 2, bytes(step * 7 % 150))
        assert write(writer, 3, bytes([step % 256]) * writer.max_payload)
        writer.commit()
        assert drain(reader)[-1] == (3, bytes([step % 256]) * writer.max_payload)
    with pytest.raises(RingError, match="never fits"):
        writer.reserve(2, writer.max_payload + 1)
    with pytest.raises(RingError, match="never fits"):
        writer.put_control(2, bytes(writer.max_payload + 1))


def test_release_frees_only_what_was_yielded(ring):
    writer, reader = ring.writer(), ring.reader()
    for payload in (b"a", b"b"):
        write(writer, 2, payload)
    writer.commit()
    frames = reader.read()
    next(frames)
    reader.release()
    assert ring.stats().used_bytes == 64
    assert [bytes(f.payload) for f in frames] == [b"b"]


@given(st.lists(st.tuples(st.integers(0, 1500), st.booleans(), st.booleans()), max_size=60))
@settings(deadline=None)
def test_what_was_written_is_what_is_read(actions):
    ring = Ring.create(4096, control_reserve=512)
    try:
        writer, reader = ring.writer(), ring.reader()
        expected, got = [], []
        for number, (size, control, read) in enumerate(actions):
            payload = (str(number).encode() + b"." * size)[: min(size + 4, writer.max_payload)]
            if control:
                writer.put_control(5, payload)
                expected.append((5, payload))
            elif write(writer, 2, payload):
                expected.append((2, payload))
            writer.commit()
            if read:
                got += drain(reader)
        for _ in range(len(actions) + 1):
            got += drain(reader)
            writer.commit()
        assert got == expected
    finally:
        ring.close()


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [(0, 0xDEADBEEF, "no frame here"), (8, 1 << 40, "no frame here"), (8, 500, "no frame here")],
)
def test_a_corrupt_frame_is_refused_with_its_offset(ring, offset, value, match):
    writer, reader = ring.writer(), ring.reader()
    write(writer, 2, b"good")
    write(writer, 2, b"bad")
    writer.commit()
    struct.pack_into("<Q" if offset else "<I", ring.data, 64 + offset, value)
    frames = reader.read()
    assert bytes(next(frames).payload) == b"good"
    with pytest.raises(RingError, match=match) as caught:
        next(frames)
    assert caught.value.offset == 64


def test_an_impossible_head_is_refused(ring):
    ring.writer()
    reader = ring.reader()
    ring.words[8] = ring.capacity * 3
    with pytest.raises(RingError, match="impossible"):
        next(reader.read())


def test_what_is_not_a_ring_is_refused(tmp_path):
    with pytest.raises(RingError, match="cannot open"):
        Ring.open(str(tmp_path / "none"))
    short = tmp_path / "short"
    short.write_bytes(b"x")
    with pytest.raises(RingError, match="not a ring"):
        Ring.open(str(short))
    blank = tmp_path / "blank"
    blank.write_bytes(bytes(16384))
    with pytest.raises(RingError, match="not a ring of version"):
        Ring.open(str(blank))
    with pytest.raises(RingError, match="at least"):
        Ring.create(0)
    with pytest.raises(RingError, match="does not fit"):
        Ring.create(8192, control_reserve=8192)


def _hold(path, role, ready, leave):
    ring = Ring.open(path)
    getattr(ring, role)()
    ready.set()
    leave.wait(30)


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_each_side_has_one_living_holder(ring, role):
    context = multiprocessing.get_context("spawn")
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(ring.path, role, ready, leave))
    process.start()
    try:
        assert ready.wait(30)
        with pytest.raises(RingError, match=f"already the {role}"):
            getattr(ring, role)()
    finally:
        leave.set()
        process.join(30)
    assert process.exitcode == 0
    getattr(ring, role)()


def _produce(path, count):
    ring = Ring.open(path)
    writer = ring.writer()
    digest = hashlib.sha256()
    for number in range(count):
        payload = struct.pack("<I", number) * (1 + number % 37)
        digest.update(payload)
        while not write(writer, 2, payload):
            time.sleep(0)
        if number % 3 == 0:
            writer.commit()
        writer.beat(number, number)
    writer.put_control(3, digest.digest())
    while ring.stats().pending_controls:
        writer.commit()
    writer.commit()


def test_two_processes_pass_many_frames_through_a_small_ring(ring):
    count = 20_000
    process = multiprocessing.get_context("spawn").Process(target=_produce, args=(ring.path, count))
    process.start()
    digest, seen, deadline, told = hashlib.sha256(), 0, time.monotonic() + 60, None
    reader = ring.reader()
    try:
        while told is None and time.monotonic() < deadline:
            for frame in reader.read():
                if frame.kind == 3:
                    told = bytes(frame.payload)
                else:
                    assert struct.unpack_from("<I", frame.payload)[0] == seen
                    digest.update(frame.payload)
                    seen += 1
            reader.release()
    finally:
        process.join(30)
    assert process.exitcode == 0
    assert seen == count
    assert told == digest.digest()
    assert ring.stats().steps == count - 1
    assert ring.stats().writer_pid == process.pid
    assert ring.stats().frames == count + 1


@pytest.mark.skipif(sys.platform != "linux", reason="memfd")
def test_closing_leaves_no_descriptor():
    before = len(list(Path("/proc/self/fd").iterdir()))
    ring = Ring.create(8192)
    view = ring.data[:10]
    ring.close()
    ring.close()
    assert bytes(view) == bytes(10)  # a view still held keeps its memory
    view.release()
    del ring
    assert len(list(Path("/proc/self/fd").iterdir())) == before


ALLOCATE = """
import os, resource, sys
from undercurrent.capture.ring import Ring
from undercurrent.errors import RingError
kind, most = sys.argv[1], 32 << 20
open_before = len(os.listdir("/proc/self/fd"))
if kind == "RLIMIT_AS":
    most += os.sysconf("SC_PAGE_SIZE") * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(getattr(resource, kind), (most, most))
try:
    Ring.create(64 << 20)
except RingError as exc:
    print(exc)
assert len(os.listdir("/proc/self/fd")) == open_before
ring = Ring.create(1 << 20)
ring.writer().put_control(1, b"goes on")
print([bytes(frame.payload) for frame in ring.reader().read()])
"""


@pytest.mark.parametrize("kind", ["RLIMIT_FSIZE", "RLIMIT_AS"])
def test_memory_that_cannot_be_had_is_said_and_leaves_nothing_behind(kind):
    command = [sys.executable, "-c", ALLOCATE, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    error, went_on = done.stdout.splitlines()
    assert error.startswith("cannot allocate a ring of ")
    assert "publisher.ring_mib" in error
    assert went_on == "[b'goes on']"


FULL_SHM = """
mount -t tmpfs -o size=64k tmpfs /dev/shm && { cat /dev/zero > /dev/shm/all 2> /dev/null; exec "$0" -c "$1"; }
"""
NO_ROOM = """
import os
from undercurrent.capture.ring import Ring
assert os.statvfs("/dev/shm").f_bavail == 0
ring = Ring.create(4 << 20)
writer, reader = ring.writer(), Ring.open(ring.path).reader()
at = writer.reserve(2, 1 << 20)
writer.data[at : at + (1 << 20)] = bytes(1 << 20)
writer.commit()
print([len(frame.payload) for frame in reader.read()])
"""


def test_a_full_dev_shm_is_nothing_to_a_ring():
    unshare = ["unshare", "-Urm"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this kernel lets nobody mount a /dev/shm of their own")
    command = [*unshare, "sh", "-c", FULL_SHM, sys.executable, NO_ROOM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"[{1 << 20}]\n"
