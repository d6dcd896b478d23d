"""The page on evaluation runs as it stands."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "evaluate.md"


def test_the_example_runs_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {"folder": tmp_path})  # noqa: S102
    headline, gain = capsys.readouterr().out.splitlines()
    assert headline.startswith("At the threshold for 1 % FPR the probe acts on ")
    assert gain.startswith("0.")
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.html",
        "report.json",
        "report.schema.json",
        "scores.parquet",
    }
