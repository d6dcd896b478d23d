"""A plan as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from engine_worker.planning import Asked, Figure
from undercurrent.capacity.units import shown_bytes, shown_duration


def told(asked: Asked, found: Sequence[Figure]) -> str:
    """Return a plan for a person: each figure, and below it where it comes from."""
    traffic, model = asked.traffic, asked.model
    lines = [
        f"{model.name}: {model.layers} layers of {model.width:,} in {model.dtype} ({model.path})",
        f"{traffic.requests_per_s:g} requests/s of {traffic.prompt_tokens:g} prompt tokens, "
        f"{traffic.cached_tokens:g} of them cached, and {traffic.generated:g} generated, one each "
        f"{traffic.token_ms:g} ms; {asked.engines} engines",
    ]
    about = ""
    for figure in found:
        if figure.about != about:
            about = figure.about
            lines += ["", about]
        lines += [f"  {figure.name:<22} {shown(figure)}", f"      = {figure.formula}"]
    return "\n".join(lines) + "\n"


def as_json(found: Sequence[Figure]) -> str:
    """Return a plan as one JSON object: figures by what they are about and by name."""
    tree: dict[str, dict[str, object]] = {}
    for figure in found:
        tree.setdefault(figure.about, {})[figure.name] = {
            "value": figure.value if math.isfinite(figure.value) else None,
            "formula": figure.formula,
        }
    return json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def shown(figure: Figure) -> str:
    """Return a figure's number as people read it: by the unit in its name."""
    if not math.isfinite(figure.value):
        return "without end"
    if figure.name.endswith("bytes_per_s"):
        return f"{shown_bytes(figure.value)}/s"
    if figure.name.endswith("_bytes"):
        return shown_bytes(figure.value)
    if figure.name.endswith("_per_s"):
        return f"{figure.value:,.1f}"
    return shown_duration(figure.value) if figure.name.endswith("_s") else f"{figure.value:,.3g}"
