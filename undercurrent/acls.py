"""What each service may do on a cluster that checks it: one table, least privilege.

    engine      prompts in, generations and answers to commands out; dead letters of what nobody else answers for
    publisher   the engine worker's publisher process, where it has credentials of its own
    server      a bare vLLM server with its publisher
    probes      a probe host
    producer    sends prompts, follows their generations, labels what it sends
    replay      reads what is recorded: replay, dataset export, evaluations; writes nothing
    operator    looks at everything, stops, labels, rolls out, sends again, erases
    admin       makes topics and mends their settings

A right of a topic or a group names it in full: what else is on the cluster stays out of reach. `Describe` follows from
any of Read, Write, Alter and Delete, as Kafka has it, and is only listed where it stands alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from undercurrent.topics import Topic, TopicPlan

READER_GROUPS = "undercurrent-reader-"
"""Beginning of the group names of readers that join no group; librdkafka asks for the coordinator all the same."""


class Service(StrEnum):
    """Who connects; see the module."""

    ENGINE = "engine"
    PUBLISHER = "publisher"
    SERVER = "server"
    PROBES = "probes"
    PRODUCER = "producer"
    REPLAY = "replay"
    OPERATOR = "operator"
    ADMIN = "admin"


class Resource(StrEnum):
    """What a right is on; values as `kafka-acls.sh` spells them."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"


class Operation(StrEnum):
    """What may be done; values as Kafka spells them."""

    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    DESCRIBE = "Describe"
    DESCRIBE_CONFIGS = "DescribeConfigs"
    ALTER_CONFIGS = "AlterConfigs"


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One thing that a service may do.

    Args:
        resource: kind of what it is on.
        name: of the topic, group or transactional id.
        operation: what may be done.
        prefixed: `name` is the beginning of names.
    """

    resource: Resource
    name: str
    operation: Operation
    prefixed: bool = False

    def __str__(self) -> str:
        kind = self.resource.value.replace("-", " ")
        return f"{self.operation.value} on {kind} {self.name}{'*' if self.prefixed else ''}"


@dataclass(frozen=True, slots=True)
class Names:
    """Names that a deployment chooses, besides those of its topics.

    Args:
        engine_group: `group.name` of the engine workers.
        probe_services: `service.name` of each fleet of probe hosts.
        joined: what probes read that join points, as `residual+attn`; each has a group as a point has.
    """

    engine_group: str = "engine"
    probe_services: tuple[str, ...] = ("probes",)
    joined: tuple[str, ...] = ()


def rights(plan: TopicPlan, service: Service, names: Names = Names()) -> tuple[Right, ...]:
    """Return all that a service may do, without doubles, sorted.

    Args:
        plan: the topics.
        service: who.
        names: of groups.
    """
    table: Mapping[Service, Callable[[TopicPlan, Names], Iterator[Right]]] = {
        Service.ENGINE: _engine,
        Service.PUBLISHER: _publisher,
        Service.SERVER: _server,
        Service.PROBES: _probes,
        Service.PRODUCER: _producer,
        Service.REPLAY: _replay,
        Service.OPERATOR: _operator,
        Service.ADMIN: _admin,
    }
    return tuple(sorted(set(table[service](plan, names))))


def topics_of(plan: TopicPlan, service: Service) -> list[Topic]:
    """Return the topics that a service has anything to do with, in the plan's order."""
    named = {right.name for right in rights(plan, service) if right.resource is Resource.TOPIC}
    return [topic for topic in plan.topics() if topic.name in named]


def groups_of(plan: TopicPlan, names: Names = Names()) -> list[str]:
    """Return the consumer groups of a pipeline."""
    return [f"{plan.prefix}.{names.engine_group}", letters_group(plan, names), *_probe_groups(plan, names)]


def letters_group(plan: TopicPlan, names: Names = Names()) -> str:
    """Return the group in which engines look for records that nobody can read; its transactions begin alike."""
    return f"{plan.prefix}.{names.engine_group}.letters"


def commands(principal: str, granted: Iterable[Right], bootstrap_servers: str) -> list[str]:
    """Return the lines of `kafka-acls.sh` that grant rights: one for each topic, group or transactional id.

    Args:
        principal: who gets them, as `User:name`.
        granted: the rights, sorted.
        bootstrap_servers: of the cluster.
    """
    lines = []
    for (resource, name, prefixed), same in groupby(granted, key=lambda r: (r.resource, r.name, r.prefixed)):
        operations = " ".join(f"--operation {right.operation.value}" for right in same)
        pattern = " --resource-pattern-type prefixed" if prefixed else ""
        lines.append(
            f"kafka-acls.sh --bootstrap-server {bootstrap_servers} --add --allow-principal '{principal}' "
            f"{operations} --{resource.value} '{name}'{pattern}"
        )
    return lines


def _on(resource: Resource, names: Iterable[str], *operations: Operation, prefixed: bool = False) -> Iterator[Right]:
    return (Right(resource, name, operation, prefixed) for name in names for operation in operations)


def _topics(names: Iterable[str], *operations: Operation) -> Iterator[Right]:
    return _on(Resource.TOPIC, names, *operations)


def _reads_by_hand() -> Iterator[Right]:
    return _on(Resource.GROUP, [READER_GROUPS], Operation.DESCRIBE, prefixed=True)


def _activations(plan: TopicPlan) -> Sequence[str]:
    return [plan.activations(point) for point in plan.points]


def _probe_groups(plan: TopicPlan, names: Names) -> Sequence[str]:
    read = (*plan.points, *names.joined)
    return [f"{plan.prefix}.{service}.{point}" for service in names.probe_services for point in read]


def _engine(plan: TopicPlan, names: Names) -> Iterator[Right]:
    # It ends the streams of a worker that died.
    writes = (plan.generations, plan.acks, *map(plan.dlq, (plan.prompts, *plan.swept)), *_activations(plan))
    yield from _topics((plan.prompts, *plan.swept), Operation.READ)
    yield from _topics(writes, Operation.WRITE)
    yield from _on(Resource.GROUP, [f"{plan.prefix}.{names.engine_group}"], Operation.READ)
    yield from _sweeps(plan, names)
    yield from _reads_by_hand()


def _sweeps(plan: TopicPlan, names: Names) -> Iterator[Right]:
    letters = letters_group(plan, names)
    yield from _on(Resource.GROUP, [letters], Operation.READ)
    ids = [f"{letters}."]
    yield from _on(Resource.TRANSACTIONAL_ID, ids, Operation.WRITE, Operation.DESCRIBE, prefixed=True)


def _publisher(plan: TopicPlan, _: Names) -> Iterator[Right]:
    # A new incarnation is announced on the acknowledgements.
    yield from _topics((plan.acks, *_activations(plan)), Operation.WRITE)
    # How large a record may be.
    yield from _topics(_activations(plan), Operation.DESCRIBE_CONFIGS)


def _server(plan: TopicPlan, names: Names) -> Iterator[Right]:
    # Its letters' writer commits a position of the erasures, for nothing but to have the group in its transaction.
    yield from _topics((*plan.swept_by_servers, plan.erasures), Operation.READ)
    yield from _topics(map(plan.dlq, plan.swept_by_servers), Operation.WRITE)
    yield from _publisher(plan, names)
    yield from _sweeps(plan, names)
    yield from _reads_by_hand()


def _probes(plan: TopicPlan, names: Names) -> Iterator[Right]:
    sources = _activations(plan)
    yield from _topics((*sources, plan.rollouts, plan.probe_state), Operation.READ)
    yield from _topics((plan.verdicts, plan.control, plan.probe_state, *map(plan.dlq, sources)), Operation.WRITE)
    groups = _probe_groups(plan, names)
    yield from _on(Resource.GROUP, groups, Operation.READ)
    # A member without a stable slot draws the rest of its id anew at each start.
    ids = [f"{group}." for group in groups]
    yield from _on(Resource.TRANSACTIONAL_ID, ids, Operation.WRITE, Operation.DESCRIBE, prefixed=True)
    yield from _reads_by_hand()


def _producer(plan: TopicPlan, _: Names) -> Iterator[Right]:
    yield from _topics((plan.prompts, plan.labels), Operation.WRITE)
    # What is erased is not followed.
    yield from _topics((plan.generations, plan.erasures), Operation.READ)
    yield from _reads_by_hand()


def _replay(plan: TopicPlan, names: Names) -> Iterator[Right]:
    beside = (plan.prompts, plan.generations, plan.verdicts, plan.labels, plan.rollouts, plan.erasures)
    yield from _topics((*_activations(plan), *beside), Operation.READ)
    # How far the live hosts are, whose verdicts it compares with.
    yield from _on(Resource.GROUP, _probe_groups(plan, names), Operation.DESCRIBE)
    yield from _reads_by_hand()


def _operator(plan: TopicPlan, names: Names) -> Iterator[Right]:
    everything = [topic.name for topic in plan.topics()]
    yield from _topics(everything, Operation.READ, Operation.DESCRIBE_CONFIGS)
    # Commands, labels, versions, marks; prompts that go again, with a note of it; ends of a retired engine's streams.
    own = (plan.control, plan.acks, plan.labels, plan.rollouts, plan.erasures, plan.probe_state)
    again = (plan.prompts, plan.dlq(plan.prompts))
    yield from _topics((*own, *again, *_activations(plan)), Operation.WRITE)
    yield from _on(Resource.GROUP, groups_of(plan, names), Operation.READ)
    yield from _reads_by_hand()


def _admin(plan: TopicPlan, names: Names) -> Iterator[Right]:
    everything = [topic.name for topic in plan.topics()]
    made = (Operation.CREATE, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS)
    yield from _topics(everything, *made)
    yield from _on(
        Resource.GROUP, groups_of(plan, names), Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS
    )
