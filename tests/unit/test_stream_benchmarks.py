"""The benchmark of the streams: what can be asked for, what it says of an aim, and that every part is one."""

from __future__ import annotations

import argparse
from importlib import import_module

import pytest

from benchmarks.stream_parts import Aim, Options, in_turn, ratio
from benchmarks.streams import part_names, table, wanted


@pytest.mark.parametrize("name", part_names())
def test_every_part_says_what_it_measures_and_can_be_asked_for(name):
    part = import_module(f"benchmarks.stream_parts.{name}")
    assert part.__doc__
    assert callable(part.measure)
    assert all(isinstance(aim, Aim) for aim in part.AIMS.values())
    assert wanted(f" {name}") == [name]


def test_an_unknown_part_is_refused_with_those_that_there_are():
    with pytest.raises(argparse.ArgumentTypeError, match=r"no part 'nothing'; there are .*publish"):
        wanted("publish,nothing")
    assert wanted(None) == part_names()


def test_the_table_says_which_aims_are_met():
    told = table(
        {"publish_ratio": 0.6, "rate": 12.0, "cost": 0.01}, {"publish_ratio": Aim(">=", 0.7), "cost": Aim("<", 1)}
    )
    assert [line.split()[-1] for line in told.splitlines()] == ["aim", "missed", "12", "met"]


def test_sides_take_turns_and_are_compared_round_by_round():
    order: list[str] = []

    def side(name, figure):
        return lambda: order.append(name) or figure * len(order)

    in_turn({"a": side("a", 2.0), "b": side("b", 1.0)}, Options(rounds=20, seed=3))
    assert [sorted(order[at : at + 2]) for at in range(0, 40, 2)] == [["a", "b"]] * 20
    assert len(set(order[::2])) == 2
    assert ratio({"a": [4.0, 9.0, 1.0], "b": [2.0, 3.0, 1.0]}, "a", "b") == 2.0
