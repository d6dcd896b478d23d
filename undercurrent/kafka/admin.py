"""Topics as the plan has them, and as the cluster has them.

    admin = TopicAdmin(settings)
    for difference in admin.differences(plan.topics()):
        print(difference)
    admin.apply(plan)                       # creates what is missing, mends settings, refuses the rest

A partition count is never changed, up or down: it decides where a key lies, so that a request's records would part.
Growing means new topics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # documented names that the stub leaves out
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from undercurrent.errors import TopicError, UnreachableError
from undercurrent.kafka.asking import Asking
from undercurrent.kafka.client import KafkaSettings, reason_of
from undercurrent.kafka.records import client_partition

if TYPE_CHECKING:
    from undercurrent.topics import Topic, TopicPlan

# What the embedded broker does not tell, and does not have either.
_UNTOLD = frozenset({"min.insync.replicas"})


@dataclass(frozen=True)
class ActualTopic:
    """A topic as the cluster has it; `config` holds what the broker tells of its settings."""

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str] = field(default_factory=dict)


class DifferenceKind(StrEnum):
    """How a topic differs from its plan."""

    MISSING = "missing"
    PARTITIONS = "partitions"
    COPIES = "copies"
    CONFIG = "config"


@dataclass(frozen=True)
class Difference:
    """One way in which a topic differs from its plan.

    Attributes:
        topic: its name.
        kind: missing, another partition count, too few copies, or a setting.
        key: the setting's name for `CONFIG`, else empty.
        planned: what the plan says.
        actual: what the cluster says, empty when missing.
    """

    topic: str
    kind: DifferenceKind
    key: str
    planned: str
    actual: str

    @property
    def mendable(self) -> bool:
        """Whether `apply` may mend it."""
        return self.kind not in (DifferenceKind.PARTITIONS, DifferenceKind.COPIES)

    def __str__(self) -> str:
        match self.kind:
            case DifferenceKind.MISSING:
                return f"{self.topic}: missing, planned with {self.planned} partitions"
            case DifferenceKind.PARTITIONS:
                return f"{self.topic}: {self.actual} partitions, planned {self.planned}"
            case DifferenceKind.COPIES:
                return (
                    f"{self.topic}: {self.actual} copies of each partition, and {self.planned} have to be in sync: "
                    "nothing could be written; give its partitions more replicas first"
                )
            case _:
                return f"{self.topic}: {self.key} is {self.actual or 'not set'}, planned {self.planned}"


def compare(planned: Iterable[Topic], actual: Mapping[str, ActualTopic]) -> list[Difference]:
    """Return how topics differ from their plan, in the plan's order. Pure."""
    found: list[Difference] = []
    for topic in planned:
        there = actual.get(topic.name)
        if there is None:
            found.append(Difference(topic.name, DifferenceKind.MISSING, "", str(topic.partitions), ""))
            continue
        if there.partitions != topic.partitions:
            found.append(
                Difference(topic.name, DifferenceKind.PARTITIONS, "", str(topic.partitions), str(there.partitions))
            )
        if there.replication_factor < topic.min_insync_replicas:
            copies, needed = str(there.replication_factor), str(topic.min_insync_replicas)
            found.append(Difference(topic.name, DifferenceKind.COPIES, "", needed, copies))
        found.extend(
            Difference(topic.name, DifferenceKind.CONFIG, key, value, there.config.get(key, ""))
            for key, value in topic.config.items()
            if there.config and there.config.get(key) != value and not (key in _UNTOLD and key not in there.config)
        )
    return found


_WHY = (
    "A partition count is never changed: a topic cannot shrink, and in one that grows the records of a key would lie "
    "in two partitions. Use another prefix and move over"
)


class TopicAdmin:
    """Describes, creates and mends topics.

    Args:
        settings: the connection.
        timeout_s: how long one operation may take.
    """

    def __init__(self, settings: KafkaSettings, *, timeout_s: float = 15.0) -> None:
        self._ask = Asking(settings, timeout_s)

    def describe(self, names: Iterable[str], *, with_config: bool = True) -> dict[str, ActualTopic]:
        """Return the topics among `names` that exist.

        Raises:
            UnreachableError: no broker answered in time.
        """
        wanted = set(names)
        try:
            metadata = self._ask.client.list_topics(timeout=self._ask.timeout_s).topics
        except KafkaException as exc:
            self._ask.forget()
            raise UnreachableError(f"topics cannot be listed: {reason_of(exc)}") from exc
        present = {
            name: topic for name, topic in metadata.items() if name in wanted and not topic.error and topic.partitions
        }
        configs = self._configs(present) if with_config and present else {}
        return {
            name: ActualTopic(
                name, len(topic.partitions), len(next(iter(topic.partitions.values())).replicas), configs.get(name, {})
            )
            for name, topic in present.items()
        }

    def differences(self, planned: Sequence[Topic]) -> list[Difference]:
        """Return how the cluster's topics differ from the planned ones."""
        return compare(planned, self.describe(topic.name for topic in planned))

    def check_partitions(self, planned: Sequence[Topic]) -> None:
        """Make certain that every topic exists with its planned partition count: cheap, fit for every minute.

        Raises:
            TopicError: one is missing or has another count; intake has to stop.
        """
        actual = self.describe((topic.name for topic in planned), with_config=False)
        wrong = [str(found) for found in compare(planned, actual)]
        if wrong:
            raise TopicError("; ".join(wrong))

    def apply(self, plan: TopicPlan) -> list[Difference]:
        """Create what is missing and mend settings; nothing is done when anything is beyond mending.

        Returns:
            What was mended.

        Raises:
            TopicError: a topic has another partition count than planned, or the broker refuses a setting.
            UnreachableError: no broker answered in time.
        """
        planned = {topic.name: topic for topic in plan.topics()}
        found = self.differences(list(planned.values()))
        refused = [str(difference) for difference in found if not difference.mendable]
        if refused:
            raise TopicError(f"{'; '.join(refused)}. {_WHY}")
        missing = [planned[d.topic] for d in found if d.kind is DifferenceKind.MISSING]
        self.create(missing, replication_factor=plan.replication_factor)
        self._mend([difference for difference in found if difference.kind is DifferenceKind.CONFIG])
        self._wait_for(lambda: not self.differences(list(planned.values())), "changes")
        return found

    def create(self, topics: Sequence[Topic], *, replication_factor: int = 1) -> None:
        """Create topics and wait until the cluster knows them; one that exists already is left as it is."""
        if not topics:
            return
        new = [
            NewTopic(t.name, num_partitions=t.partitions, replication_factor=replication_factor, config=t.config)
            for t in topics
        ]
        for name, future in self._ask.client.create_topics(new, request_timeout=self._ask.timeout_s).items():
            self._ask.done(future, f"topic {name} cannot be created", unless=KafkaError.TOPIC_ALREADY_EXISTS)
        names = {topic.name for topic in topics}
        self._wait_for(lambda: len(self.describe(names, with_config=False)) == len(names), "created topics")

    def delete(self, names: Sequence[str]) -> None:
        """Delete topics; one that does not exist is nothing."""
        if not names:
            return
        for name, future in self._ask.client.delete_topics(list(names), request_timeout=self._ask.timeout_s).items():
            self._ask.done(future, f"topic {name} cannot be deleted", unless=KafkaError.UNKNOWN_TOPIC_OR_PART)

    def delete_records(self, before: Mapping[tuple[str, int], int]) -> None:
        """Delete what lies below an offset, as retention does when it is old enough.

        Args:
            before: per partition the first offset that stays.
        """
        asked = [client_partition(where, offset) for where, offset in before.items()]
        for where, future in self._ask.client.delete_records(asked, request_timeout=self._ask.timeout_s).items():
            self._ask.result(future, f"records of {where.topic}[{where.partition}] cannot be deleted")

    def _configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        answers = self._ask.client.describe_configs(resources, request_timeout=self._ask.timeout_s)
        configs: dict[str, dict[str, str]] = {}
        for resource, future in answers.items():
            entries = self._ask.result(future, f"settings of topic {resource.name} cannot be read")
            configs[resource.name] = {key: str(entry.value) for key, entry in entries.items()}
        return configs

    def _mend(self, differences: Sequence[Difference]) -> None:
        by_topic: dict[str, list[ConfigEntry]] = {}
        for found in differences:
            entry = ConfigEntry(found.key, found.planned, incremental_operation=AlterConfigOpType.SET)
            by_topic.setdefault(found.topic, []).append(entry)
        if not by_topic:
            return
        resources = [
            ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries) for name, entries in by_topic.items()
        ]
        answers = self._ask.client.incremental_alter_configs(resources, request_timeout=self._ask.timeout_s)
        for resource, future in answers.items():
            self._ask.result(future, f"settings of topic {resource.name} cannot be changed")

    def _wait_for(self, visible: Callable[[], bool], what: str) -> None:
        # The controller has agreed; the broker that is asked learns of it a moment later.
        deadline = time.monotonic() + self._ask.timeout_s
        while not visible():
            if time.monotonic() > deadline:
                raise UnreachableError(f"{what} did not become visible in {self._ask.timeout_s:g} s")
            self._ask.client.poll(0.05)
