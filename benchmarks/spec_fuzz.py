"""How long the parsers of `undercurrent.spec` take for 10 kB of garbage.

    python -m benchmarks.spec_fuzz --rounds 50

Each kind of text is made anew in each round from a fixed seed; a time is that of one call on this thread alone
(`thread_time`), so that other work on the machine does not count. Every call must end with a spec or with the one error
of its parser: anything else ends the benchmark.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from undercurrent.errors import PositionSyntaxError, SpecValidationError
from undercurrent.spec import parse_dict, parse_position, parse_yaml

SIZE = 10_000
GOAL_MS = 50.0

Draw = Callable[[random.Random], Any]


def drawn_from(alphabet: str) -> Draw:
    """Texts of single characters."""
    return lambda rng: "".join(rng.choice(alphabet) for _ in range(SIZE))


def repeated(piece: str) -> Draw:
    """One piece, over and over."""
    return lambda _rng: (piece * (SIZE // len(piece) + 1))[:SIZE]


def anchors(rng: random.Random) -> str:
    """A bomb: each line an alias of many lines before it."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    while sum(map(len, lines)) < SIZE:
        known = len(lines)
        aliases = ", ".join(f"*a{rng.randrange(max(0, known - 3), known)}" for _ in range(9))
        lines.append(f"a{known}: &a{known} [{aliases}]")
    return "\n".join(lines)


def almost(rng: random.Random) -> str:
    """A right spec of some 10 kB with one character changed."""
    points = [
        f"  - {{name: p{n}, layers: [{n}], tensor_type: attn_out, position: 'generated[*]', probe_args: {{a: {n}}}}}\n"
        for n in range(SIZE // 90)
    ]
    text = "version: 1\nextraction_points:\n" + "".join(points)
    at = rng.randrange(len(text))
    return text[:at] + rng.choice("[]{}:,&*!x0\n\t") + text[at + 1 :]


def shared(_rng: random.Random) -> dict[str, Any]:
    """Plain data of 25 lists, each holding the one before ten times."""
    data: Any = "x"
    for _ in range(25):
        data = [data] * 10
    return {"extraction_points": [{"name": "p", "probe_args": {"a": data}}]}


YAML_KINDS: Mapping[str, Draw] = {
    "flow characters": drawn_from("[]{}:,- \n"),
    "block characters": drawn_from("abc:-\n  "),
    "anchors and aliases": drawn_from("&a *a [], "),
    "printable": drawn_from("".join(map(chr, range(32, 127)))),
    "any of Unicode": lambda rng: "".join(chr(rng.choice((rng.randrange(0xD800), 0x1F600))) for _ in range(SIZE)),
    "alias bomb": anchors,
    "nested lists": repeated("["),
    "nested mappings": repeated("{a: "),
    "nested blocks": repeated("- "),
    "question marks": repeated("? "),
    "doubled keys": repeated("key: value\n"),
    "tags": repeated("!!python/object/apply:os.system [x]\n"),
    "one number": repeated("9"),
    "base 60": repeated("1:59:"),
    "one spec, one character wrong": almost,
}


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=50)
    rounds = options.parse_args().rounds
    worst = 0.0
    print(f"| {'input':35} | median, ms | worst, ms |\n|{'-' * 37}|{'-' * 12}|{'-' * 11}|")
    for name, draw in YAML_KINDS.items():
        worst = max(worst, row(f"YAML: {name}", draw, parse_yaml, SpecValidationError, rounds))
    garbage = drawn_from("prompt[]generated:*+-0123456789 ")
    worst = max(worst, row("position: garbage", garbage, parse_position, PositionSyntaxError, rounds))
    worst = max(worst, row("position: digits", repeated("9"), parse_position, PositionSyntaxError, rounds))
    row("data: lists of shared lists, 10^25", shared, parse_dict, SpecValidationError, rounds)
    print(f"\nworst of the texts: {worst:.1f} ms; the goal is below {GOAL_MS:g} ms")


def row(name: str, draw: Draw, parse: Callable[[Any], object], error: type[Exception], rounds: int) -> float:
    """Print one line; return its worst time, ms."""
    rng = random.Random(name)
    spent = []
    for _ in range(rounds):
        given = draw(rng)
        start = time.thread_time()
        with contextlib.suppress(error):
            parse(given)
        spent.append((time.thread_time() - start) * 1000)
    print(f"| {name:35} | {statistics.median(spent):10.2f} | {max(spent):9.2f} |")
    return max(spent)


if __name__ == "__main__":
    main()
