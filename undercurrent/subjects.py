"""Which schema stands under which subject of a schema registry, and the codec of a connection.

    codec = codec_of(settings)                       # reads what any registered schema wrote
    settings = with_ids(settings, plan, stopped)     # once, at a service's start: from then on it writes too
    for difference in differences(settings, plan):
        print(difference)
    apply(settings, plan)                            # the one place where anything is registered

A subject is named by TopicRecordNameStrategy: `<topic>-<full name of the record>`. Every released version of a schema
is registered, oldest first, and the subject is set to FULL_TRANSITIVE: each version reads what every other wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from undercurrent.codec import Codec
from undercurrent.codec.avro import schema_text, versions_of
from undercurrent.codec.registered import NAMESPACE, RegistryFraming, recognised
from undercurrent.errors import DecodeError, TopicError, UnreachableError
from undercurrent.kafka.registry import Registry, registry_of
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.topics import TopicPlan

logger = logging.getLogger(__name__)

COMPATIBILITY = "FULL_TRANSITIVE"
_AGAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Subject:
    """Where the versions of one schema stand for one topic.

    Args:
        topic: its name.
        name: of the schema.
    """

    topic: str
    name: str

    def __str__(self) -> str:
        return f"{self.topic}-{NAMESPACE}.{self.name}"


@dataclass(frozen=True, slots=True)
class SubjectDifference:
    """One way in which a subject is not as it should be.

    Args:
        subject: which.
        keys: versions to register, oldest first.
        level: the compatibility level that it has, where that is to be changed; None where it is right.
    """

    subject: Subject
    keys: tuple[str, ...] = ()
    level: str | None = None

    def __str__(self) -> str:
        if self.keys:
            return f"{self.subject}: not registered: {', '.join(self.keys)}"
        return f"{self.subject}: compatibility is {self.level or 'not set'}, planned {COMPATIBILITY}"


def subjects(plan: TopicPlan) -> Iterator[Subject]:
    """Yield the subject of every message on every topic of a plan."""
    streams = ("PublisherStarted", "StreamStarted", "ActivationRecord", "StreamInvalidated", "StreamEnded")
    written = {
        plan.prompts: ("PromptRequest",),
        plan.generations: ("Accepted", "Released", "GenerationEvent"),
        plan.control: ("ControlCommand", "ProbeHeartbeat"),
        plan.acks: ("EngineStarted", "ControlAck"),
        plan.verdicts: ("ProbeVerdict", "ProbeHeartbeat"),
        plan.labels: ("Label",),
        plan.rollouts: ("Rollout",),
        plan.erasures: ("Erasure",),
        plan.probe_state: ("ProbeState",),
        **{plan.activations(point): streams for point in plan.points},
    }
    for topic, names in written.items():
        yield from (Subject(topic, name) for name in names)


def codec_of(settings: KafkaSettings, plan: TopicPlan | None = None) -> Codec:
    """Return what encodes and decodes messages on a connection: framed for its registry, where it names one.

    Args:
        settings: the connection; see `with_ids` for what a service gives.
        plan: the topics, in whose subjects the ids of what is written are looked up when they are needed first; None
            where nothing is written, or the settings know the ids.
    """
    if settings.registry is None:
        return Codec()
    registry, known = registry_of(settings.registry), dict(settings.registry.known)
    for name, number in known.items():
        registry.learn(number, schema_text(name))

    def id_of(name: str) -> int:
        if name in known:
            return known[name]
        if plan is None:
            raise TopicError(f"the id of {name} was not looked up in the registry: nothing was to be written here")
        return registered_id(registry, plan, name)

    return Codec(RegistryFraming(id_of, registry.text_of))


def registered_id(registry: Registry, plan: TopicPlan, name: str) -> int:
    """Return the id under which this version's schema of a message is registered.

    Raises:
        TopicError: it is not registered for one of its topics, or has several ids.
        UnreachableError: the registry does not answer.
    """
    found: dict[int, Subject] = {}
    for subject in subjects(plan):
        if subject.name != name:
            continue
        number = next((at for at, key in _registered(registry, subject) if key == name), None)
        if number is None:
            raise TopicError(f"{subject}: this version's schema is not registered; run: undercurrent topics apply")
        found.setdefault(number, subject)
    if len(found) > 1:
        ids = ", ".join(f"{number} in {subject}" for number, subject in found.items())
        raise TopicError(f"the registry gives {name} several ids, {ids}: it must give equal schemas one id")
    if not found:
        raise TopicError(f"no topic of this plan takes {name}")
    return next(iter(found))


def with_ids(settings: KafkaSettings, plan: TopicPlan, stopped: Callable[[float], bool]) -> KafkaSettings:
    """Return a connection that knows the id of every schema; wait for a registry that does not answer.

    Args:
        settings: the connection.
        plan: the topics.
        stopped: waits so many seconds and returns whether to wait no longer.

    Raises:
        TopicError: a schema is not registered.
        UnreachableError: the registry did not answer before the end of the wait.
    """
    if settings.registry is None or settings.registry.known:
        return settings
    registry = registry_of(settings.registry)
    names = dict.fromkeys(subject.name for subject in subjects(plan))
    while True:
        try:
            known = {name: registered_id(registry, plan, name) for name in names}
        except UnreachableError as exc:
            logger.warning("%s; waiting for it", exc)
            if stopped(_AGAIN_S):
                raise
        else:
            own = settings.registry.model_copy(update={"known": tuple(sorted(known.items()))})
            return settings.model_copy(update={"registry": own})


def differences(settings: KafkaSettings, plan: TopicPlan) -> list[SubjectDifference]:
    """Return how the subjects of a plan differ from what they should be; nothing where there is no registry.

    Raises:
        UnreachableError: the registry does not answer.
    """
    if settings.registry is None:
        return []
    registry, found = registry_of(settings.registry), []
    for subject in subjects(plan):
        there = {key for _, key in _registered(registry, subject)}
        if subject.name not in there:
            # Earlier ones only where nothing is: behind a later version they would be in the wrong order.
            missing = (subject.name,) if there else tuple(versions_of(subject.name))
            found.append(SubjectDifference(subject, keys=missing))
        level = registry.compatibility(str(subject)) if there else ""
        if level != COMPATIBILITY:
            found.append(SubjectDifference(subject, level=level))
    return found


def apply(settings: KafkaSettings, plan: TopicPlan) -> list[SubjectDifference]:
    """Register what is missing and set the compatibility level; may be repeated, and does nothing without a registry.

    Returns:
        What was mended.

    Raises:
        TopicError: the registry refuses a schema, as incompatible with what is registered.
        UnreachableError: the registry does not answer.
    """
    if settings.registry is None:
        return []
    registry, found = registry_of(settings.registry), differences(settings, plan)
    mended: set[str] = set()
    for difference in found:
        name = str(difference.subject)
        for key in difference.keys:
            registry.register(name, schema_text(key))
            if name not in mended:
                # Behind the first version, since not every registry lets it be set before: the others are checked.
                registry.set_compatibility(name, COMPATIBILITY)
                mended.add(name)
        if not difference.keys and name not in mended:
            registry.set_compatibility(name, COMPATIBILITY)
    return found


def _registered(registry: Registry, subject: Subject) -> Iterator[tuple[int, str]]:
    """Yield id and key of each version of a subject, newest first; another key where it is not of ours."""
    for version in registry.versions(str(subject)):
        try:
            yield version.schema_id, recognised(version.text, version.schema_id)[0]
        except DecodeError:
            yield version.schema_id, ""
