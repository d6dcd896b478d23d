"""Write the tables of docs/compatibility.md: `python scripts/compatibility.py`. A test holds the two together.

They are made from the table that an engine asks at start, `undercurrent.adapters.vllm.support`; what stands between the
two marks is replaced.
"""

from __future__ import annotations

from pathlib import Path

from undercurrent.adapters.vllm import support

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"
BEGIN, END = "<!-- made by scripts/compatibility.py -->\n", "<!-- end -->"


def render(document: str) -> str:
    """Return a document with its tables as they are now.

    Args:
        document: as it stands; it has the two marks.
    """
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{support.render()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
