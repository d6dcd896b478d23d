from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from undercurrent.errors import UnreachableError
from undercurrent.testing.brokers import Broker, BrokerUnavailableError, find_kafka_home
from undercurrent.testing.servers import free_port
from undercurrent.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

_OWNER = """
import sys
from undercurrent.testing.brokers import embedded_broker
with embedded_broker() as broker:
    print(broker.pid, flush=True)
    sys.stdin.read()
"""


def test_a_folder_without_kafka_is_said(tmp_path: Path) -> None:
    with pytest.raises(BrokerUnavailableError, match="holds no Apache Kafka"):
        find_kafka_home(tmp_path)


def test_a_broker_that_ends_says_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no space left'); raise SystemExit(3)"]
    with pytest.raises(UnreachableError, match=r"ended: no space left"):
        Broker("apache", command, free_port(), tmp_path).start(20.0)


def test_a_broker_that_does_not_serve_is_ended(tmp_path: Path) -> None:
    broker = Broker("apache", [sys.executable, "-c", "import time; time.sleep(600)"], free_port(), tmp_path)
    with pytest.raises(UnreachableError, match="did not serve"):
        broker.start(0.2)
    assert broker.pid is None


def test_an_embedded_broker_dies_with_its_owner() -> None:
    pytest.importorskip("noida_db")
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        broker = psutil.Process(int(owner.stdout.readline()))
        assert "noida-db" in " ".join(broker.cmdline())
        owner.kill()
    wait_until(lambda: not broker.is_running() or broker.status() == psutil.STATUS_ZOMBIE, 10.0, "the broker's end")


def test_a_free_port_can_be_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))


def test_waiting_ends_with_the_value_or_says_what_was_missing() -> None:
    assert wait_until(lambda: os.getpid(), 1.0) == os.getpid()
    with pytest.raises(TimeoutError, match=r"the moon did not come about in 0\.05 s; last value 0"):
        wait_until(lambda: 0, 0.05, "the moon", every_s=0.01)
