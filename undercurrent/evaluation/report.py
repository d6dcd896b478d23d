"""A report: its content, its tables, and the files that it is written to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.findings import Findings, read_findings, schema
from undercurrent.evaluation.page import page, summary
from undercurrent.files import together, write_text, writing


@dataclass(frozen=True, slots=True)
class Report:
    """What a probe is worth.

    Args:
        findings: all figures, as `report.json` holds them.
        table: a row per request: request_id, group, part, label, score, weight, unit, probability.
        tokens: token scores of the requests listed as wrong, where texts may be shown.
    """

    findings: Findings
    table: pd.DataFrame
    tokens: pd.DataFrame | None = None

    def html(self) -> str:
        """Return the report as one self-contained HTML document."""
        return page(self.findings, self.table, self.tokens)

    def write(self, folder: Path) -> None:
        """Write `report.html`, `report.json`, `report.schema.json` and `scores.parquet`.

        Raises:
            OSError: naming the file that cannot be written; a report that was there is as it was.
        """
        with together(folder, last="report.json") as fresh:
            write_text(fresh / "report.json", self.findings.to_json())
            write_text(fresh / "report.schema.json", json.dumps(schema(), indent=1) + "\n")
            write_text(fresh / "report.html", self.html())
            with writing(fresh / "scores.parquet"):
                self.table.to_parquet(fresh / "scores.parquet", index=False)

    @classmethod
    def read(cls, folder: Path) -> Report:
        """Read what `write` wrote, without token scores.

        Raises:
            EvaluationError: a file is missing or no part of a report.
        """
        for name in ("report.json", "scores.parquet"):
            if not (folder / name).is_file():
                raise EvaluationError(
                    f"{folder} holds no {name}; a report is a folder with report.json and scores.parquet, as "
                    "`undercurrent probe evaluate` writes it"
                )
        try:
            table = pd.read_parquet(folder / "scores.parquet")
        except (OSError, pa.ArrowException) as wrong:
            raise EvaluationError(f"{folder / 'scores.parquet'} cannot be read: {wrong}") from wrong
        return cls(read_findings(folder / "report.json"), table)

    def _repr_html_(self) -> str:
        return summary(self.findings, self.table)
