from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.integration.kafka.group_members import Member, Owner
from undercurrent.kafka.client import Assignor, Isolation
from undercurrent.kafka.subscriber import GroupSubscriber
from undercurrent.testing.brokers import Broker


@pytest.fixture(
    params=[
        ("embedded", Assignor.RANGE),
        ("apache", Assignor.RANGE),
        ("apache", Assignor.COOPERATIVE_STICKY),
        ("apache", Assignor.CONSUMER),
    ],
    ids=["embedded-range", "apache-range", "apache-cooperative", "apache-consumer"],
)
def grouped(request: pytest.FixtureRequest) -> tuple[Broker, Assignor]:
    """Every broker with every assignor that it knows."""
    kind, assignor = request.param
    return request.getfixturevalue(f"{kind}_broker"), assignor


@pytest.fixture
def members(request: pytest.FixtureRequest) -> Iterator[Callable[..., Member]]:
    """Makes group members, and closes them at the end."""
    made: list[Member] = []

    def make(broker: Broker, group: str, topic: str, assignor: Assignor, isolation: Isolation | None = None) -> Member:
        owner = Owner()
        subscriber = GroupSubscriber(
            broker.settings(),
            group,
            [topic],
            owner,
            assignor=assignor,
            isolation=isolation or Isolation.READ_UNCOMMITTED,
        )
        subscriber.open()
        made.append(Member(subscriber, owner))
        return made[-1]

    yield make
    for member in made:
        member.subscriber.close()
