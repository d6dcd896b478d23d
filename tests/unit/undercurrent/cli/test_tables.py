from __future__ import annotations

import pytest

from undercurrent.cli.tables import write_table


def test_columns_are_as_wide_as_their_widest_cell(capsys: pytest.CaptureFixture[str]) -> None:
    write_table([{"name": "a", "count": 1}, {"name": "longer", "count": None}])
    assert capsys.readouterr().out == "name    count\na       1\nlonger  None\n"


def test_no_rows_are_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write_table([])
    assert capsys.readouterr().out == ""
