"""When a client counts as stranded."""

from __future__ import annotations

import json

import pytest

from undercurrent.kafka.stranding import Watch, has_a_way

INTERNAL = {":0/internal": {"source": "internal", "nodeid": -1, "state": "INIT"}}
COORDINATOR = {"GroupCoordinator": {"source": "logical", "nodeid": -1, "nodename": "", "state": "INIT"}}
BOOTSTRAP = {"127.0.0.1:9092/bootstrap": {"source": "configured", "nodeid": -1, "state": "CONNECT", "stateage": 1}}


def statistics(brokers: dict[str, object], topics: str = "{ }") -> str:
    """Return statistics in librdkafka's layout."""
    return f'{{ "name": "rdkafka#consumer-1", "brokers":{json.dumps(brokers)}, "topics":{topics}}}'


def learned(state: str, age_s: float = 60.0, node: int = 1) -> dict[str, object]:
    broker = {"source": "learned", "nodeid": node, "state": state, "stateage": int(age_s * 1e6)}
    return {f"127.0.0.1:9092/{node}": broker}


LOST = statistics({**INTERNAL, **COORDINATOR})


@pytest.mark.parametrize("state", ["UP", "CONNECT", "TRY_CONNECT", "APIVERSION_QUERY", "DOWN"])
def test_a_broker_that_is_down_is_still_a_way_back(state: str) -> None:
    assert has_a_way(statistics({**INTERNAL, **COORDINATOR, **learned(state)}))


def test_a_broker_at_rest_is_one_as_long_as_another_is_connected_to_or_it_was_just_disconnected() -> None:
    assert has_a_way(statistics({**learned("INIT", node=1), **learned("UP", node=2)}))
    assert has_a_way(statistics({**learned("INIT", node=1), **learned("DOWN", node=2)}))
    assert has_a_way(statistics(learned("INIT", 2.0)))


def test_a_broker_that_nobody_connects_to_is_none() -> None:
    assert not has_a_way(statistics({**INTERNAL, **COORDINATOR, **learned("INIT", 4.0)}))


def test_the_addresses_of_the_start_are_a_way_back() -> None:
    assert has_a_way(statistics({**INTERNAL, **BOOTSTRAP}))


def test_roles_without_an_address_are_none() -> None:
    assert not has_a_way(LOST)
    assert not has_a_way(statistics({}))


@pytest.mark.parametrize("text", ["", "{}", '{"brokers":', '{"brokers":[]}', '{"brokers":{"a":1}}', '{"brokers": 3}'])
def test_what_is_not_understood_strands_nobody(text: str) -> None:
    assert has_a_way(text)


def test_texts_that_librdkafka_does_not_escape_are_not_looked_at() -> None:
    assert not has_a_way(statistics({**INTERNAL}, topics='{}, "cgrp":{"rebalance_reason":"topic "t" is new"}'))


def test_one_look_in_vain_is_not_enough() -> None:
    watch = Watch()
    watch.look(LOST)
    assert not watch.stranded
    watch.look(statistics(learned("DOWN")))
    watch.look(LOST)
    assert not watch.stranded
    watch.look(LOST)
    assert watch.stranded
    watch.look(statistics(BOOTSTRAP))
    assert not watch.stranded
