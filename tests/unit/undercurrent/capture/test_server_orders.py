"""On a bare server a client can add points and nothing else: its request is captured whatever it sends."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.capture.opening import slot_of
from undercurrent.capture.server_orders import ServerOrders, ServerRules, name_of, safe_id
from undercurrent.topics import partition_of

ENGINE_ID = "cmpl-mine-0-0a1b2c3d"


def orders(always=("a",), trusted=False, clock_us=lambda: 1000):
    rules = ServerRules(points=("a", "b", "c"), always=always, partitions=3, trusted=trusted)
    return ServerOrders(rules, clock_us)


def test_a_request_without_an_order_is_captured_at_the_points_that_always_are():
    taken = orders(always=("c", "a")).take(ENGINE_ID, None)
    assert not taken.fault
    assert (taken.order.request_id, taken.order.attempt, taken.order.index) == (ENGINE_ID, 1, 0)
    assert taken.order.points == ("a", "c")
    assert taken.order.partition == partition_of(ENGINE_ID, 3)


def test_where_nothing_is_always_captured_a_request_without_an_order_is_not():
    assert orders(always=()).take(ENGINE_ID, None).order is None


def test_an_order_adds_points_and_takes_none_away():
    assert orders().take(ENGINE_ID, json.dumps({"points": ["c"]})).order.points == ("a", "c")
    assert orders().take(ENGINE_ID, json.dumps({"points": []})).order.points == ("a",)
    assert orders(always=()).take(ENGINE_ID, json.dumps({"points": ["b"]})).order.points == ("b",)


BAD = [
    "", "{", "[]", "null", "1e999", 7, 1.5, ["a"], "[" * 5000, "9" * 6000, '{"points": "a"}', '{"points": ["x"]}',
    '{"points": ["a", "a"]}', '{"points": [["a"]]}', '{"points": ["a"], "partition": 1}', '{"engine_id": "x"}',
    '{"points": ["a"], "request_id": "other"}', '{"attempt": 5}', '{"tenant": "root"}', '{"slot": 0}', "x" * 20_000,
    '{"points": ["\\ud800"]}',
]  # fmt: skip


@pytest.mark.parametrize("raw", BAD)
def test_a_bad_order_is_a_fault_and_the_request_is_captured_as_if_it_had_none(raw):
    taken = orders().take(ENGINE_ID, raw)
    assert taken.fault
    assert taken.order == orders().take(ENGINE_ID, None).order
    assert orders(always=()).take(ENGINE_ID, raw).order is None


@given(st.one_of(st.text(), st.binary().map(lambda b: b.decode("latin-1")), st.integers(), st.lists(st.floats())))
def test_no_order_makes_a_request_another_ones(raw):
    order = orders().take(ENGINE_ID, raw).order
    assert (order.request_id, order.attempt, order.index, order.tenant) == (ENGINE_ID, 1, 0, None)
    assert "a" in order.points


def test_a_fault_does_not_repeat_what_the_client_sent():
    assert "hunter2" not in orders().take(ENGINE_ID, '{"hunter2": "hunter2"}').fault


@pytest.mark.parametrize("engine_id", ["x" * 1025, "nul\x00", "\ud800", ""])
def test_an_id_that_no_message_can_carry_is_captured_under_its_hash(engine_id):
    order = orders().take(engine_id, None).order
    assert order.request_id.startswith("sha256-")
    assert order.request_id == safe_id(engine_id)


@pytest.mark.parametrize(
    ("engine_id", "name"),
    [
        ("cmpl-mine-0-0a1b2c3d", ("cmpl-mine-0", 0)),
        ("chatcmpl-mine-0a1b2c3d", ("chatcmpl-mine", 0)),
        ("3_chatcmpl-mine-0a1b2c3d", ("chatcmpl-mine", 3)),
        # Such an id a client can give itself: it is no child of anything.
        ("3_mine-0a1b2c3d", ("3_mine", 0)),
        ("without", ("without", 0)),
    ],
)
def test_a_trusted_name_is_the_id_that_the_server_answers_with(engine_id, name):
    assert name_of(engine_id) == name
    order = orders(trusted=True).take(engine_id, None).order
    assert (order.request_id, order.index) == name


def test_a_trusted_client_names_its_request_itself():
    raw = json.dumps({"request_id": "mine", "attempt": 7, "index": 2, "tenant": "me", "points": ["b"]})
    order = orders(trusted=True).take(ENGINE_ID, raw).order
    assert (order.request_id, order.attempt, order.index, order.tenant) == ("mine", 7, 2, "me")
    assert order.points == ("a", "b")
    assert order.partition == partition_of("mine", 3)


def test_an_id_in_use_is_a_fault_and_the_second_one_goes_by_the_engines_id():
    taking, raw = orders(trusted=True), json.dumps({"request_id": "mine"})
    assert not taking.take("cmpl-a-0-00000000", raw).fault
    for number in range(1, 300):
        taken = taking.take(f"cmpl-a-0-{number:08x}", raw)
        assert taken.fault
        assert taken.order.request_id == f"cmpl-a-0-{number:08x}"
    taking.close("cmpl-a-0-00000001")
    assert taking.take("cmpl-b-0-00000000", raw).fault, "the first one runs on"
    taking.close("cmpl-a-0-00000000")
    assert taking.take("cmpl-c-0-00000000", raw).order.request_id == "mine"


def test_an_id_used_again_is_a_higher_attempt_whatever_the_clock_does():
    taking = orders(trusted=True, clock_us=iter([50, 50, 10]).__next__)
    attempts = []
    for number in range(3):
        attempts.append(taking.take(f"cmpl-a-0-0000000{number}", None).order.attempt)
        taking.close(f"cmpl-a-0-0000000{number}")
    assert attempts == [50, 51, 52]
    with_one = json.dumps({"attempt": 3})
    assert taking.take(ENGINE_ID, with_one).order.attempt == 3, "whoever numbers its attempts itself is left to it"


def test_children_of_one_request_are_no_collision():
    taking = orders(trusted=True)
    taken = [taking.take(f"{n}_cmpl-a-0-00000000", None) for n in range(3)]
    assert [t.order.index for t in taken] == [0, 1, 2]
    assert not any(t.fault for t in taken)


def test_an_api_server_calls_a_request_by_the_engines_id_and_by_the_one_its_client_knows():
    named = orders().name("0_cmpl-a-0-12345678", "cmpl-a-0", 0, json.dumps({"points": ["b"]}))
    assert named.names == {"0_cmpl-a-0-12345678": (1, 0), "cmpl-a-0": None, "cmpl-a": None}
    assert named.order is None


@pytest.mark.parametrize("raw", [None, json.dumps({"request_id": "mine", "points": ["b"]}), json.dumps({"attempt": 9})])
@pytest.mark.parametrize("index", [0, 2])
def test_where_clients_are_trusted_the_worker_calls_a_request_as_its_api_server_does(raw, index):
    named = orders(trusted=True, clock_us=lambda: 77).name(ENGINE_ID, "cmpl-mine-0", index, raw)
    order = orders(trusted=True, clock_us=lambda: 99).take(ENGINE_ID, named.order).order
    assert named.names[order.request_id] == (order.attempt, order.index)
    assert named.names[ENGINE_ID] == (1, 0)
    assert order.index == index


@pytest.mark.parametrize("raw", BAD)
def test_an_order_that_a_worker_will_refuse_is_left_as_it_is(raw):
    named = orders(trusted=True).name(ENGINE_ID, "cmpl-mine-0", 0, raw)
    taken = orders(trusted=True).take(ENGINE_ID, raw if named.order is None else named.order)
    assert named.names[taken.order.request_id] == (taken.order.attempt, taken.order.index)


@pytest.mark.parametrize("index", [0, 5, 2**31 - 1])
def test_where_a_length_is_told_goes_on_to_the_streams_of_whatever_child(index):
    slot = (1 << 32) + 7
    raw = json.dumps({"request_id": "mine", "index": index})
    order = orders(trusted=True).take(ENGINE_ID, raw, slot).order
    assert order.slot + order.index == slot
    assert slot_of(order, index) == slot
    assert orders().take(ENGINE_ID, None).order.slot == -1


def test_points_that_count_from_the_end_need_somebody_who_says_where_that_is():
    rules = ServerRules(points=("a", "last"), always=("a",), partitions=3, from_end=frozenset({"last"}))
    raw = json.dumps({"points": ["last"]})
    told = ServerOrders(rules).take(ENGINE_ID, raw, 1 << 32)
    assert (told.order.points, told.fault) == (("a", "last"), "")
    untold = ServerOrders(rules).take(ENGINE_ID, raw)
    assert untold.order.points == ("a",)
    assert "ControlMiddleware" in untold.fault
    alone = ServerRules(points=("last",), always=("last",), partitions=3, from_end=frozenset({"last"}))
    assert ServerOrders(alone).take(ENGINE_ID, None).order is None
    assert not ServerOrders(rules).take(ENGINE_ID, None).fault
