"""What `topics apply` would change: of the topics, and of a schema registry's subjects; shown first, then made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from undercurrent import subjects
from undercurrent.counts import counted
from undercurrent.kafka.admin import Difference, DifferenceKind, TopicAdmin
from undercurrent.kafka.group_admin import HEARTBEAT_INTERVAL, SESSION_TIMEOUT, GroupAdmin
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.subjects import SubjectDifference
from undercurrent.topics import TopicPlan


@dataclass(frozen=True, slots=True)
class GroupDifference:
    """A setting of a consumer group that is not as planned.

    Args:
        group: its name.
        key: name of the setting.
        planned: its value.
        actual: what the cluster says.
    """

    group: str
    key: str
    planned: str
    actual: str


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from a plan.

    Args:
        plan: the topics.
        topics: how the cluster's differ.
        subjects: how the registry's differ.
        groups: how the settings of groups differ.
    """

    plan: TopicPlan
    topics: Sequence[Difference]
    subjects: Sequence[SubjectDifference] = ()
    groups: Sequence[GroupDifference] = ()

    @property
    def refused(self) -> list[Difference]:
        """What nobody but an operator may change: nothing at all is done while there is any."""
        return [difference for difference in self.topics if not difference.mendable]

    def lines(self) -> Iterator[str]:
        """Yield each change in words: `+` is made, `~` is changed, `!` is refused."""
        for difference in self.topics:
            yield _line(difference)
        for item in self.subjects:
            if item.keys:
                yield f"+ {item.subject}: register {', '.join(item.keys)}"
            else:
                yield f"~ {item.subject}: compatibility {item.level or 'not set'} -> {subjects.COMPATIBILITY}"

        for group in self.groups:
            yield f"~ group {group.group}: {group.key} {group.actual or 'not set'} -> {group.planned}"

    def of(self, topic: str) -> str:
        """Return what is to change of a topic, in words; empty where nothing is."""
        return "; ".join(_line(item).replace(f" {topic}:", "", 1) for item in self.topics if item.topic == topic)


def find_changes(settings: KafkaSettings, plan: TopicPlan, groups: Sequence[str] = ()) -> Changes:
    """Return how a cluster and its registry differ from a plan.

    Args:
        settings: the connection.
        plan: the topics.
        groups: the pipeline's, whose session timeout the plan may say.

    Raises:
        UnreachableError: no broker or registry answered in time.
    """
    return Changes(
        plan,
        TopicAdmin(settings).differences(plan.topics()),
        subjects.differences(settings, plan),
        list(_group_differences(settings, plan, groups)),
    )


def _group_differences(settings: KafkaSettings, plan: TopicPlan, groups: Sequence[str]) -> Iterator[GroupDifference]:
    if plan.session_timeout_ms is None:
        return
    # A member is missed when it has been silent for the whole of it: it has to be heard several times meanwhile.
    planned = {SESSION_TIMEOUT: plan.session_timeout_ms, HEARTBEAT_INTERVAL: plan.session_timeout_ms // 3}
    admin = GroupAdmin(settings)
    for group in groups:
        actual = admin.settings(group)
        for key, value in planned.items():
            if actual.get(key) != str(value):
                yield GroupDifference(group, key, str(value), actual.get(key, ""))


def make_changes(settings: KafkaSettings, changes: Changes) -> None:
    """Make the changes; nothing at all while one is refused.

    Raises:
        TopicError: one is refused, here, by the broker or by the registry.
        UnreachableError: no broker or registry answered in time.
    """
    TopicAdmin(settings).apply(changes.plan)
    subjects.apply(settings, changes.plan)
    wanted: dict[str, dict[str, str]] = {}
    for difference in changes.groups:
        wanted.setdefault(difference.group, {})[difference.key] = difference.planned
    admin = GroupAdmin(settings)
    for group, values in wanted.items():
        admin.change(group, values)


def summary(changes: Changes) -> str:
    """Return in one line how much was as planned."""
    every = len(changes.plan.topics())
    changed = len({difference.topic for difference in changes.topics})
    text = f"{every - changed} of {counted(every, 'topic was', 'topics were')} as planned"
    text += f"; {changed} created or mended" if changed else ""
    mended = len({str(item.subject) for item in changes.subjects})
    text += f"; {counted(mended, 'subject')} of schemas registered or mended" if mended else ""
    groups = len({item.group for item in changes.groups})
    return text + (f"; {counted(groups, 'group')}" if groups else "")


def _line(difference: Difference) -> str:
    match difference.kind:
        case DifferenceKind.MISSING:
            return f"+ {difference.topic}: create with {counted(int(difference.planned), 'partition')}"
        case DifferenceKind.CONFIG:
            text = f"~ {difference.topic}: {difference.key} {difference.actual or 'not set'} -> {difference.planned}"
            return f"{text}{_consequence(difference)}"
        case _:
            return f"! {difference}"


def _consequence(difference: Difference) -> str:
    """Return what a change of a setting takes away at once, in words; empty where nothing."""
    if difference.key == "cleanup.policy" and difference.planned == "compact":
        return " (of each key only the last record stays)"
    if difference.key != "retention.ms" or not difference.actual.lstrip("-").isdigit():
        return ""
    shorter = int(difference.actual) < 0 or int(difference.planned) < int(difference.actual)
    return " (older records are deleted)" if shorter else ""
