"""Clients that have lost every way to their cluster and will not find one by themselves.

A cluster whose brokers are all fenced for a moment, such as a single node that was frozen past its session with the
controller, lists no broker when it is asked. librdkafka takes that for the truth and drops the brokers that it knows.
Then it has nobody left to ask; or, with `metadata.recovery.strategy=rebootstrap`, it learns of them again and, as a
member of a classic group, may never connect to one. Where a broker is down or restarts, librdkafka tries to connect all
the time, and comes back by itself.

    consumer = make_consumer({**config, **(watch := Watch()).config()})
    consumer.poll(0.1)                      # tells the watch, so the client has to be polled
    if watch.stranded:
        abandon(consumer)                   # and make another

A producer may be idle and not polled for hours, and what a watch is told would pile up: it is asked instead, by
`is_stranded`, when it does not get on.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException

from undercurrent.errors import NotAllowedError, UnreachableError
from undercurrent.kafka.client import KafkaSettings, ping

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Producer

logger = logging.getLogger(__name__)

_INTERVAL_MS = 2000
# One look may fall between the loss of a broker and a re-bootstrap, which lists the addresses of the start again, or
# into the moment after this process was frozen.
_LOOKS = 2
# A client without any connection picks a broker to connect to every second.
_AT_REST_US = 3_000_000
_BROKERS = '"brokers":'
# The others in the list, such as the group's coordinator, are roles: without one of these they have no address.
_REAL = frozenset({"configured", "learned"})


def has_a_way(statistics: str) -> bool:
    """Return whether a client's statistics list a broker that it is connected to or tries to connect to.

    Args:
        statistics: what librdkafka hands to a `stats_cb`. What is not to be understood counts as yes.
    """
    at = statistics.find(_BROKERS)
    if at < 0:
        return True
    try:
        # Only this part: partitions make up the rest, and librdkafka does not escape all of its texts.
        listed, _ = json.JSONDecoder().raw_decode(statistics[at + len(_BROKERS) :].lstrip())
        return any(broker["source"] in _REAL and not _at_rest(broker) for broker in listed.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return True


def _at_rest(broker: Mapping[str, Any]) -> bool:
    """Whether nobody connects to a broker: fine while there is a connection to another."""
    return bool(broker["state"] == "INIT" and broker["stateage"] > _AT_REST_US)


class Watch:
    """Looks every two seconds whether one client still has a way to a broker. It costs what its statistics cost."""

    def __init__(self) -> None:
        self._looks_in_vain = 0

    @property
    def stranded(self) -> bool:
        """Whether the client has no way to a broker, by the last two looks."""
        return self._looks_in_vain >= _LOOKS

    def config(self) -> dict[str, Any]:
        """Return what the watched client's configuration needs; no other client may have it."""
        return {"statistics.interval.ms": _INTERVAL_MS, "stats_cb": self.look}

    def look(self, statistics: str) -> None:
        """Take a look; the client calls this where it is polled."""
        self._looks_in_vain = 0 if has_a_way(statistics) else self._looks_in_vain + 1


def is_stranded(settings: KafkaSettings, producer: Producer, limit_s: float = 3.0) -> bool:
    """Return whether a new client reaches the cluster and this one does not.

    Args:
        settings: the connection.
        producer: who is suspected.
        limit_s: how long either may take; a client needs up to a second to connect anew.
    """
    try:
        ping(settings, limit_s)
    except (NotAllowedError, UnreachableError):
        return False
    try:
        producer.list_topics(timeout=limit_s)
    except KafkaException:
        return True
    return False


def abandon(consumer: Consumer) -> None:
    """End a stranded client on a thread of its own: leaving its group may wait for a coordinator that never answers."""
    threading.Thread(target=_end, args=(consumer,), name="stranded-client", daemon=True).start()


def _end(consumer: Consumer) -> None:
    try:
        consumer.close()
    except (KafkaException, RuntimeError) as exc:
        logger.debug("ending a stranded client: %s", exc)
