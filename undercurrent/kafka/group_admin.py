"""Consumer groups as a cluster has them: members, settings of the broker-side protocol, and offsets moved by hand."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # documented names that the stub leaves out
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from undercurrent.errors import TopicError, UnreachableError
from undercurrent.kafka import codes
from undercurrent.kafka.asking import Asking
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.records import Partition, client_partition

if TYPE_CHECKING:
    from confluent_kafka import TopicPartition

SESSION_TIMEOUT = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL = "consumer.heartbeat.interval.ms"
_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group.

    Args:
        name: of it.
        state: as the broker tells it: stable, empty, preparing_rebalance, ...
        owners: who has each partition, as `client@host`.
        members: how many there are, also those that have no partition.
    """

    name: str
    state: str
    owners: Mapping[Partition, str]
    members: int = 0


class GroupAdmin:
    """Asks and changes consumer groups.

    Args:
        settings: the connection.
        timeout_s: how long one operation may take.
    """

    def __init__(self, settings: KafkaSettings, *, timeout_s: float = 15.0) -> None:
        self._ask = Asking(settings, timeout_s)

    def names(self, prefix: str) -> list[str]:
        """Return the groups whose name begins with something, sorted.

        Raises:
            UnreachableError: no broker answered in time.
        """
        future = self._ask.client.list_consumer_groups(request_timeout=self._ask.timeout_s)
        found = self._ask.result(future, "groups cannot be listed")
        return sorted(group.group_id for group in found.valid if group.group_id.startswith(prefix))

    def describe(self, names: Iterable[str]) -> dict[str, Group]:
        """Return groups by their name; one that does not exist is without members.

        Raises:
            UnreachableError: no coordinator answered in time.
            TopicError: it may not be asked.
        """
        found = {}
        for name in names:
            (future,) = self._ask.client.describe_consumer_groups([name], request_timeout=self._ask.timeout_s).values()
            said = self._ask.result(future, f"group {name} cannot be described")
            owners = {
                Partition(where.topic, where.partition): f"{member.client_id}@{member.host.lstrip('/')}"
                for member in said.members
                for where in (member.assignment.topic_partitions if member.assignment else ())
            }
            found[name] = Group(name, said.state.name.lower(), owners, len(said.members))
        return found

    def settings(self, name: str) -> dict[str, str]:
        """Return the settings of a group under the broker-side protocol.

        Raises:
            UnreachableError: no broker answered in time.
            TopicError: it may not be asked.
        """
        answers = self._ask.client.describe_configs(
            [ConfigResource(ResourceType.GROUP, name)], request_timeout=self._ask.timeout_s
        )
        (future,) = answers.values()
        entries = self._ask.result(future, f"settings of group {name} cannot be read")
        return {key: str(entry.value) for key, entry in entries.items()}

    def change(self, name: str, wanted: Mapping[str, str]) -> None:
        """Change settings of a group, which need not exist yet, and wait until the cluster knows them.

        Raises:
            UnreachableError: no broker answered in time.
            TopicError: the broker refuses a value; its own limits are named.
        """
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in wanted.items()
        ]
        resource = ConfigResource(ResourceType.GROUP, name, incremental_configs=entries)
        answers = self._ask.client.incremental_alter_configs([resource], request_timeout=self._ask.timeout_s)
        (future,) = answers.values()
        self._ask.result(future, f"settings of group {name} cannot be changed")
        # The controller has agreed; the broker that is asked learns of it a moment later.
        deadline = time.monotonic() + self._ask.timeout_s
        while not wanted.items() <= self.settings(name).items():
            if time.monotonic() > deadline:
                raise UnreachableError(f"settings of group {name} did not become visible in {self._ask.timeout_s:g} s")
            time.sleep(_AGAIN_S)

    def move(self, name: str, offsets: Mapping[Partition, tuple[int, str]]) -> None:
        """Commit offsets with metadata for a group that has no members.

        Raises:
            UnreachableError: no coordinator answered in time.
            TopicError: the group has members, or the broker refuses otherwise; nothing of a refused partition is moved.
        """
        listed = [client_partition(where, offset, metadata) for where, (offset, metadata) in offsets.items()]
        deadline = time.monotonic() + self._ask.timeout_s
        while (error := self._moved(name, listed)) is not None:
            if error.code() == KafkaError.UNKNOWN_MEMBER_ID:
                raise TopicError(f"group {name} has members: stop them first, or they would commit over it")
            if error.code() not in codes.COORDINATOR_BUSY or time.monotonic() > deadline:
                raise TopicError(f"group {name} cannot be moved: {error.str()}")
            time.sleep(_AGAIN_S)

    def _moved(self, name: str, listed: list[TopicPartition]) -> KafkaError | None:
        """Commit offsets; return the first partition's error where there is one."""
        answers = self._ask.client.alter_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(name, listed)], request_timeout=self._ask.timeout_s
        )
        (future,) = answers.values()
        said = self._ask.result(future, f"group {name} cannot be moved")
        return next((where.error for where in said.topic_partitions if where.error is not None), None)
