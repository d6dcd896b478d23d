"""The benchmark of overhead ends where engine, broker and consumer do not agree to the last activation."""

from __future__ import annotations

import pytest

from benchmarks.overhead.counting import Counts, check_counts


def check(*, computed=80, requests=2, acknowledged=10, **found):
    counts = {"records": 10, "activations": 80, "ended": 2, "emitted": 80, "dropped": 0} | found
    check_counts("publish_all", computed, requests, acknowledged, Counts(**counts))


def test_equal_counts_pass():
    check()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"computed": 81}, "81 activations computed by the engine, 80 activations read by the consumer"),
        ({"activations": 79}, "79 activations read by the consumer"),
        ({"emitted": 76}, "76 activations that the streams' ends speak of"),
        ({"acknowledged": 9}, "9 records acknowledged by the broker, 10 records read by the consumer"),
        ({"records": 11}, "11 records read by the consumer"),
        ({"requests": 3}, "3 requests of the engine, 2 ends of streams read"),
        ({"dropped": 1}, "1 activations lost"),
    ],
)
def test_a_difference_ends_the_run_and_names_both_sides(wrong, message):
    with pytest.raises(SystemExit, match=f"publish_all: counts differ: .*{message}"):
        check(**wrong)
