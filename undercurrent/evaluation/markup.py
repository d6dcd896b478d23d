"""HTML that needs nothing else: tables, plots with plotly inline, one document; light, dark, narrow and on paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from undercurrent.evaluation.figures import brief

LONG_TABLE = 24
"""Rows beyond which a table is folded up."""

TABLE_STYLE = """
.uc{--ink:#1f2328;--line:#d1d9e0;--head:#ddf4ff;--mark:#0969da;--grave:#a40e26}
.uc .wide{overflow-x:auto}
.uc table{border-collapse:collapse;margin:.5em 0 1.5em;font-size:14px;font-variant-numeric:tabular-nums}
.uc th,.uc td{padding:.3em .6em;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
.uc th{font-weight:600}
.uc td.n{white-space:nowrap}
.uc .head{font-size:17px;font-weight:600;padding:.8em 1em;background:var(--head);border-left:4px solid var(--mark)}
.uc .grave{color:var(--grave);font-weight:600}
.uc .text{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.6 ui-monospace,monospace;max-width:900px}
.uc summary{cursor:pointer;color:var(--mark)}
"""

PAGE_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0;background:#fff}
.uc{max-width:1120px;margin:2em auto;padding:0 1em;color:var(--ink)}
.uc h2{margin-top:1.4em;padding-top:.6em;border-top:1px solid var(--line)}
.uc h3{margin-bottom:.2em;font-size:15px}
.uc .plot{margin-bottom:1.5em}
@media (prefers-color-scheme:dark){
body{background:#0d1117}
.uc{--ink:#e6edf3;--line:#3d444d;--head:#121d2f;--mark:#4493f8;--grave:#ff7b72}
}
@media (max-width:640px){
.uc{margin:1em auto;padding:0 .6em}
.uc th,.uc td{padding:.3em .5em}
.uc .head{font-size:15px}
}
@media print{
body{background:#fff}
.uc{--ink:#000;--line:#bbb;--head:#eef;--grave:#900;max-width:none;margin:0}
.uc .plot,.uc tr{break-inside:avoid}
.uc h2,.uc h3{break-after:avoid}
}
"""

Rows = Iterable[Sequence[object]]


def document(title: str, parts: Iterable[str]) -> str:
    """Return a whole page.

    Args:
        title: of the window, plain text.
        parts: of the body, HTML.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(title)}</title><style>{TABLE_STYLE}{PAGE_STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body><div class='uc'>{''.join(parts)}</div></body></html>\n"
    )


def draw(figure: go.Figure, name: str) -> str:
    """Return a plot for a page that `document` makes.

    Args:
        figure: the plot.
        name: of its element, unique in the page.
    """
    drawn = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d"]},
        div_id=f"plot-{name}",
    )
    return f"<div class='plot'>{drawn}</div>"


def grid(head: Sequence[str], rows: Rows) -> str:
    """Return a table; a row that is too short says in its last cell why the rest is not there."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{_row(row, len(head))}</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def folded(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose later rows are folded up if it is long."""
    listed = list(rows)
    shown = grid(head, islice(listed, LONG_TABLE))
    rest = listed[LONG_TABLE:]
    if not rest:
        return shown
    return f"{shown}<details><summary>{len(rest):,} more</summary>{grid(head, rest)}</details>"


def _row(row: Sequence[object], columns: int) -> str:
    *values, last = row
    span = columns - len(values)
    return "".join(_cell(value) for value in values) + _cell(last, f" colspan={span}" if span > 1 else "")


def _cell(value: object, attributes: str = "") -> str:
    text = _shown(value)
    # A value stays beside its interval; a sentence may break.
    return f"<td{' class=n' if len(text) <= 28 else ''}{attributes}>{escape(text)}</td>"


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return brief(value) if isinstance(value, float) else str(value)
