"""Following the rollouts topic."""

from __future__ import annotations

import threading

import pytest

from probe_consumers.rollout_log import RolloutFollower
from undercurrent.errors import TopicError, UnreachableError
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.rollouts import Rollouts


class Lookup:
    """Knows nothing, and counts who asks; the second answer is that of the service's end."""

    def __init__(self, error: Exception, stop: threading.Event) -> None:
        self.asked, self._error, self._stop = 0, error, stop

    def beginning(self, partitions: object) -> dict[object, int]:
        self.asked += 1
        if self.asked == 2:
            self._stop.set()
        raise self._error


def follow(error: Exception) -> int:
    stop = threading.Event()
    lookup = Lookup(error, stop)
    settings = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    RolloutFollower(settings, "t.rollouts", Rollouts(), lookup).run(stop)  # type: ignore[arg-type]
    return lookup.asked


@pytest.mark.timeout(60)
def test_a_broker_that_does_not_answer_at_the_start_is_asked_again() -> None:
    assert follow(UnreachableError("no leader")) == 2


@pytest.mark.timeout(60)
def test_a_topic_that_is_not_there_ends_it() -> None:
    with pytest.raises(TopicError):
        follow(TopicError("no such topic"))
