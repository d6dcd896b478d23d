"""Whether the brokers let this client do what it has to, asked before it starts.

Without the question a client that lacks a right finds out late, and in words that name neither the topic nor what was
tried: a topic that it may not see is simply missing from the list of topics. So each service asks the brokers for the
operations that they allow it (KIP-430), and compares them with the table in `undercurrent.acls`.

A transactional id cannot be asked about; whoever may not use one is told by the first transaction, by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from confluent_kafka import KafkaException, TopicCollection

from undercurrent.acls import Operation, Resource, Right, Service
from undercurrent.errors import NotAllowedError, UnreachableError
from undercurrent.kafka.client import KafkaSettings, error_of, make_admin, reason_of

_REFUSED = frozenset({"TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED"})


def require(settings: KafkaSettings, service: Service, needed: Iterable[Right], *, timeout_s: float = 15.0) -> None:
    """Make certain that this client may do some things.

    Nothing is asked where the connection is not secured: nobody is told apart there.

    Args:
        settings: the connection.
        service: whose rights they are, for the message.
        needed: the rights; those on prefixes and transactional ids cannot be asked about.
        timeout_s: how long the brokers may take.

    Raises:
        NotAllowedError: naming each operation with its topic or group.
        UnreachableError: no broker answered in time.
    """
    if not settings.secured:
        return
    lacking = missing(settings, needed, timeout_s=timeout_s)
    if lacking:
        who = (
            settings.options.get("sasl.username") or settings.options.get("sasl.oauthbearer.client.id") or "this client"
        )
        raise NotAllowedError(
            f"{who} is not allowed: {', '.join(map(str, lacking))}. `undercurrent topics acls --service "
            f"{service.value}` prints all that is needed"
        )


def missing(settings: KafkaSettings, needed: Iterable[Right], *, timeout_s: float = 15.0) -> list[Right]:
    """Return the rights among `needed` that this client has not, as the brokers tell it.

    Raises:
        UnreachableError: no broker answered in time.
    """
    wanted: dict[Resource, dict[str, list[Right]]] = defaultdict(lambda: defaultdict(list))
    for right in needed:
        if not right.prefixed and right.resource is not Resource.TRANSACTIONAL_ID:
            wanted[right.resource][right.name].append(right)
    # The stub of AdminClient leaves these keyword arguments out.
    admin: Any = make_admin(settings)
    options = {"include_authorized_operations": True, "request_timeout": timeout_s}
    lacking: list[Right] = []
    if topics := wanted[Resource.TOPIC]:
        lacking += _lacking(topics, admin.describe_topics(TopicCollection(list(topics)), **options), timeout_s)
    if groups := wanted[Resource.GROUP]:
        lacking += _lacking(groups, admin.describe_consumer_groups(list(groups), **options), timeout_s)
    return lacking


def _lacking(wanted: Mapping[str, list[Right]], answers: Mapping[str, Future[Any]], timeout_s: float) -> list[Right]:
    lacking: list[Right] = []
    for name, future in answers.items():
        allowed = _allowed(future, name, timeout_s)
        if allowed is not None:
            lacking += [right for right in wanted[name] if right.operation not in allowed]
    return lacking


def _allowed(future: Future[Any], name: str, timeout_s: float) -> frozenset[Operation] | None:
    """Return what may be done with one topic or group; None where nobody can say, since it is not there yet."""
    try:
        told = future.result(timeout_s + 5.0).authorized_operations
    except KafkaException as exc:
        error = error_of(exc)
        if error is not None and error.name() in _REFUSED:
            return frozenset()
        if error is not None and not error.name().startswith("_"):
            return None
        raise UnreachableError(f"what is allowed on {name} cannot be asked: {reason_of(exc)}") from exc
    except FutureTimeoutError as exc:
        raise UnreachableError(f"what is allowed on {name}: no answer in {timeout_s:g} s") from exc
    if told is None:
        return None
    spelled = {operation.value.replace("_", "").lower(): operation for operation in Operation}
    names = {str(item.name).replace("_", "").lower() for item in told}
    return frozenset(operation for spelling, operation in spelled.items() if spelling in names)
