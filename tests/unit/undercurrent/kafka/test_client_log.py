from __future__ import annotations

import logging

import pytest

from undercurrent.kafka.client import ClientLog

TEMPLATE = "%s [%s] %s: Connect to ipv4#127.0.0.1:%d failed: Connection refused (after %dms in state CONNECT)"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fail(log: ClientLog, port: int = 9092, after_ms: int = 0, name: str = "rdkafka#consumer-1") -> None:
    log.log(logging.ERROR, TEMPLATE, "FAIL", name, f"127.0.0.1:{port}/1", port, after_ms)


def test_a_line_that_comes_again_is_logged_once_and_counted(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "undercurrent.kafka.client")
    log = ClientLog(clock=clock)
    for at in range(100):
        fail(log, after_ms=at)
        clock.now_s += 0.25
    said = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(" (")[2] for line in said] == [
        "after 0ms in state CONNECT)",
        "said 39 times more since)",
        "said 39 times more since)",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_another_line_and_one_of_another_facility_are_not_held_back(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "undercurrent.kafka.client")
    log = ClientLog(clock=clock)
    fail(log)
    log.log(logging.ERROR, "%s: %s: Disconnected", "FAIL", "a")
    for _ in range(2):
        log.log(logging.WARNING, "%s: %s", "CONFWARN", "a key")
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2 + [logging.WARNING] * 2


def test_what_is_remembered_of_lines_is_bounded(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "undercurrent.kafka.client")
    log = ClientLog(clock=clock)
    names = [chr(0x4E00 + at) for at in range(10_000)]
    for name in names:
        fail(log, name=name)
    assert len(caplog.records) == len(names)
    assert len(vars(log)["_repeats"]) <= 64
