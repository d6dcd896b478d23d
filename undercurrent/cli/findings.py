"""Findings of an audit for a person: by request, what each kind means said once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undercurrent.protocol.audit import Finding


def write_findings(findings: Sequence[Finding]) -> None:
    """Write findings to standard output, those of a request under its id."""
    from rich.table import Table

    from undercurrent.cli.rendering import console, text

    out, last = console(), None
    for finding in findings:
        if finding.request_id != last:
            last = finding.request_id
            out.print(text(last or "no request", "bold"))
        about = [
            f"attempt {finding.attempt}" if finding.attempt is not None else "",
            f"child {finding.index}" if finding.index else "",
            finding.point or "",
            f"probe {finding.probe}" if finding.probe else "",
        ]
        said = ", ".join(part for part in about if part)
        row = Table.grid(padding=(0, 2))
        row.add_column(no_wrap=True, min_width=20)
        row.add_column(overflow="fold")
        row.add_row(
            text(f"  {finding.kind.value}", "red"), text(f"{said}: {finding.detail}" if said else finding.detail)
        )
        out.print(row)
