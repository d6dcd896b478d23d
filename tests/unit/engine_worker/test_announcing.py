"""Which starts mean that a process must end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_worker.announcing import engine_started, replaced_by

OURS = engine_started("e")


@pytest.mark.parametrize(
    ("message", "offset", "says"),
    [
        (OURS, 5, None),
        (OURS, 4, None),
        (replace(OURS, engine="other"), 9, None),
        (replace(OURS, pid=71), 9, None),
        (replace(OURS, pid=72), 9, "engine e was started again on .* as incarnation 9"),
        (replace(OURS, pid=71, host="elsewhere"), 9, r"started again on elsewhere \(pid 71\)"),
        (replace(OURS, pid=71, retired=True), 9, "engine e was retired"),
    ],
    ids=["itself", "before", "another engine", "its publisher", "a later process", "another machine", "retired"],
)
def test_a_later_process_of_the_same_name_ends_it_and_its_own_publishers_do_not(message, offset, says):
    error = replaced_by(message, offset, engine="e", incarnation=5, publishers={70, 71})
    if says is None:
        assert error is None
    else:
        with pytest.raises(type(error), match=says):
            raise error
