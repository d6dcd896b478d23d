"""Rights of `undercurrent.acls` as a cluster keeps them: granted, or taken away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from confluent_kafka.admin import (  # type: ignore[attr-defined]  # documented names that the stub leaves out
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from undercurrent.acls import Operation, Resource, Right
from undercurrent.errors import NotAllowedError
from undercurrent.kafka.asking import Asking
from undercurrent.kafka.client import KafkaSettings

_RESOURCES = {
    Resource.TOPIC: ResourceType.TOPIC,
    Resource.GROUP: ResourceType.GROUP,
    Resource.TRANSACTIONAL_ID: ResourceType.TRANSACTIONAL_ID,
}
_OPERATIONS = {
    Operation.READ: AclOperation.READ,
    Operation.WRITE: AclOperation.WRITE,
    Operation.CREATE: AclOperation.CREATE,
    Operation.DESCRIBE: AclOperation.DESCRIBE,
    Operation.DESCRIBE_CONFIGS: AclOperation.DESCRIBE_CONFIGS,
    Operation.ALTER_CONFIGS: AclOperation.ALTER_CONFIGS,
}


def grant(settings: KafkaSettings, principal: str, granted: Iterable[Right], *, timeout_s: float = 15.0) -> int:
    """Grant rights from any host; one that is there already stays as it is. Return how many were asked for.

    Args:
        settings: the connection of somebody who may alter the cluster.
        principal: who gets them, as `User:name`.
        granted: the rights.
        timeout_s: how long the brokers may take.

    Raises:
        NotAllowedError: the cluster checks no rights, or this client may not grant any.
        UnreachableError: no broker answered in time.
    """
    bindings = [_binding(principal, right) for right in granted]
    ask = Asking(settings, timeout_s, refused=NotAllowedError)
    for binding, future in ask.client.create_acls(bindings, request_timeout=timeout_s).items():
        ask.result(future, f"rights on {binding.name} cannot be granted")
    return len(bindings)


def withdraw(settings: KafkaSettings, principal: str, granted: Iterable[Right], *, timeout_s: float = 15.0) -> None:
    """Take rights away that `grant` gave.

    Args:
        settings: the connection of somebody who may alter the cluster.
        principal: whose they are, as `User:name`.
        granted: the rights.
        timeout_s: how long the brokers may take.

    Raises:
        NotAllowedError: the cluster checks no rights, or this client may not take any away.
        UnreachableError: no broker answered in time.
    """
    filters = [_binding(principal, right, AclBindingFilter) for right in granted]
    ask = Asking(settings, timeout_s, refused=NotAllowedError)
    for wanted, future in ask.client.delete_acls(filters, request_timeout=timeout_s).items():
        ask.result(future, f"rights on {wanted.name} cannot be taken away")


def _binding(principal: str, right: Right, kind: Any = AclBinding) -> Any:  # noqa: ANN401 - binding or filter
    pattern = ResourcePatternType.PREFIXED if right.prefixed else ResourcePatternType.LITERAL
    operation, allow = _OPERATIONS[right.operation], AclPermissionType.ALLOW
    return kind(_RESOURCES[right.resource], right.name, pattern, principal, "*", operation, allow)
