"""Draw the ring of parts and topics: `python docs/pictures/ring.py` writes ring.svg beside this file."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

INK, PAPER, PROCESS, TOPIC, STOP = "#1f2933", "#ffffff", "#e3edf7", "#fdf3d8", "#b42318"
WIDTH, HEIGHT = 1000, 480


def box(x: int, y: int, title: str, lines: list[str], *, width: int = 200, height: int = 96) -> str:
    """Return a process: a rounded box with a title and small lines below it."""
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" fill="{PROCESS}" stroke="{INK}"/>']
    parts.append(text(x + width // 2, y + 26, title, size=16, bold=True))
    parts += [text(x + width // 2, y + 48 + 18 * i, line, size=12) for i, line in enumerate(lines)]
    return "".join(parts)


def topic(x: int, y: int, name: str, lines: list[str], *, width: int = 190) -> str:
    """Return a topic: a flat box with its name and what it holds."""
    height = 30 + 16 * len(lines)
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{TOPIC}" stroke="{INK}"/>']
    parts.append(text(x + width // 2, y + 20, name, size=13, bold=True))
    parts += [text(x + width // 2, y + 37 + 16 * i, line, size=11) for i, line in enumerate(lines)]
    return "".join(parts)


def text(x: int, y: int, words: str, *, size: int, bold: bool = False, colour: str = INK) -> str:
    """Return centred words."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}"{weight} fill="{colour}" text-anchor="middle">{escape(words)}</text>'
    )


def arrow(points: list[tuple[int, int]], *, colour: str = INK) -> str:
    """Return a line with a head at its last point."""
    path = " ".join(f"{x},{y}" for x, y in points)
    head = "stop" if colour == STOP else "head"
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" marker-end="url(#{head})"/>'


def draw() -> str:
    """Return the whole picture as SVG."""
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
        for name, colour in (("head", INK), ("stop", STOP))
    )
    parts = [
        box(20, 50, "producer", ["submits prompts,", "follows generations"], width=170),
        topic(225, 66, "prompts", ["key: request id"], width=150),
        box(
            410, 30, "engine worker", ["vLLM, taps in the model", "shared-memory ring", "publisher process"], height=116
        ),
        topic(650, 66, "activations.<point>", ["StreamStarted, records,", "StreamEnded: no gap unseen"], width=200),
        box(750, 190, "probe hosts", ["one probe per stream,", "exactly-once verdicts"], height=84),
        topic(440, 200, "control", ["abort request r"], width=150),
        topic(120, 190, "generations", ["Accepted, tokens, final:", "the arbiter of attempts"], width=190),
        topic(750, 330, "verdicts", ["scores, watermarks, results"], width=200),
        box(
            410,
            330,
            "replay",
            ["the same probe code over the record:", "equal bit for bit, or it says where"],
            width=260,
            height=84,
        ),
        arrow([(190, 95), (225, 95)]),
        arrow([(375, 95), (410, 95)]),
        arrow([(610, 95), (650, 95)]),
        arrow([(850, 97), (880, 97), (880, 190)]),
        arrow([(750, 225), (590, 225)], colour=STOP),
        arrow([(515, 200), (515, 146)], colour=STOP),
        arrow([(440, 146), (440, 170), (270, 170), (270, 190)]),
        arrow([(150, 190), (105, 170), (105, 146)]),
        arrow([(850, 274), (850, 330)]),
        arrow([(750, 355), (670, 355)]),
        arrow([(700, 128), (700, 310), (620, 310), (620, 330)]),
        text(668, 216, "abort", size=12, colour=STOP, bold=True),
        text(160, 320, "Parts meet only at topics, and data", size=13),
        text(160, 340, "flows one way round. The engine never", size=13),
        text(160, 360, "waits for Kafka; a probe never runs", size=13),
        text(160, 380, "in the engine's process.", size=13),
        text(640, 455, "blue: processes   ·   yellow: Kafka topics   ·   red: what stops a generation", size=12),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, sans-serif">'
        f'<defs>{heads}</defs><rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_name("ring.svg").write_text(draw(), encoding="utf-8")
