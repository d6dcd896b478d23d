"""A loop that does not come back from its probes ends its process; one that waits for a broker does not."""

from __future__ import annotations

import time

from probe_consumers.watchdog import EXIT_CODE, Busy, Watchdog


def test_a_loop_that_is_with_its_probes_for_too_long_ends_the_process(caplog):
    ended, busy = [], Busy()
    dog = Watchdog([Busy(), busy], 0.01, ended.append)
    dog.look()
    with busy.at("activations.p[3] at offset 17"):
        time.sleep(0.02)
        dog.look()
    assert ended == [EXIT_CODE]
    assert "activations.p[3] at offset 17" in caplog.text
    dog.look()
    assert ended == [EXIT_CODE]


def test_a_loop_is_at_nothing_once_its_probes_have_come_back():
    busy = Busy()
    with busy.at("something"):
        with busy.at("something in it"):
            assert busy.seen()[1] == "something in it"
        assert busy.seen()[1] == "something"
    assert busy.seen() == (0.0, "")
