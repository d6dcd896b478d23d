"""Numbers of things in words."""

from __future__ import annotations

import pytest

from undercurrent.counts import counted


@pytest.mark.parametrize(
    ("count", "plain", "with_verb"),
    [(0, "0 records", "0 files are"), (1, "1 record", "1 file is"), (2, "2 records", "2 files are")],
)
def test_one_is_singular_and_any_other_number_is_not(count: int, plain: str, with_verb: str) -> None:
    assert counted(count, "record") == plain
    assert counted(count, "file is", "files are") == with_verb


def test_thousands_are_set_apart() -> None:
    assert counted(1_234_567, "row") == "1,234,567 rows"
