"""The page on evaluation runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.undercurrent.cli.evaluation_doubles import write_dataset, write_probe

PAGE = Path(__file__).parents[3] / "docs" / "evaluate.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_a_dataset_is_scored_as_the_page_says(tmp_path: Path) -> None:
    dataset, probe = write_dataset(tmp_path / "d", 6), write_probe(tmp_path / "guard")
    code = examples()[1].replace("probes/guard", str(probe)).replace('"d"', f'"{dataset}"').replace("12", "5")
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
    frame = names["frame"]
    assert sorted(frame.index) == [f"r{number}" for number in range(6)]
    assert frame.loc[["r0", "r3"], "decided_at"].tolist() == [6, 6]
    assert frame.loc[["r1", "r2", "r4", "r5"], "decided_at"].isna().all()


def test_the_example_runs_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(examples()[0], str(PAGE), "exec"), {"folder": tmp_path})  # noqa: S102
    headline, gain = capsys.readouterr().out.splitlines()
    assert headline.startswith("At the threshold for 1 % FPR the probe acts on ")
    assert gain.startswith("0.")
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.html",
        "report.json",
        "report.schema.json",
        "scores.parquet",
    }
