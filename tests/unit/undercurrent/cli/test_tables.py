from __future__ import annotations

import pytest

from undercurrent.cli.tables import moment, write_table


def test_columns_are_as_wide_as_their_widest_cell(capsys: pytest.CaptureFixture[str]) -> None:
    write_table([{"name": "a", "count": 1}, {"name": "longer", "count": None}])
    assert capsys.readouterr().out == "name    count\na       1\nlonger  None\n"


def test_no_rows_are_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write_table([])
    assert capsys.readouterr().out == ""


def test_a_moment_that_no_calendar_has_is_told_as_it_is() -> None:
    assert moment(1_700_000_000_000_000) == "2023-11-14T22:13:20+00:00"
    assert moment(2**62) == f"{2**62} us"
