"""What the streams cost on a real Kafka: publishing, consuming, commits, aborts, memory; each figure beside its aim.

    KAFKA_HOME=... python -m benchmarks.streams [--only publish,...] [--seconds 5] [--rounds 5] [--seed 1]

Each part is a module of `benchmarks/stream_parts` and says at its top how it measures; all of them share one Apache
Kafka that is started here. "Raw" is the client library alone with the same acknowledgements, idempotence, compression,
isolation and batch. A part that fails is told and ends the run with exit code 1 when the others are through. The last
line is one JSON object of every figure.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module

from benchmarks import stream_parts
from benchmarks.stream_parts import Aim, Options
from undercurrent.testing.brokers import Broker, apache_kafka


def part_names() -> list[str]:
    """Return the parts that there are, in the order in which they run."""
    return sorted(module.name for module in pkgutil.iter_modules(stream_parts.__path__))


def run_part(name: str, broker: Broker, options: Options) -> tuple[dict[str, float], Mapping[str, Aim]]:
    """Return the figures of one part, and what some of them should be.

    Args:
        name: of the part.
        broker: where it makes its topics.
        options: for every part.
    """
    part = import_module(f"{stream_parts.__name__}.{name}")
    print(f"\n== {name}: {(part.__doc__ or '').splitlines()[0]}", flush=True)
    return part.measure(broker, options), part.AIMS


def table(figures: Mapping[str, float], aims: Mapping[str, Aim]) -> str:
    """Return the figures as a table to read."""
    width = max(map(len, figures), default=0)
    rows = [f"{'figure':{width}}  {'value':>12}  aim"]
    for key, figure in figures.items():
        aim = aims.get(key)
        told = "" if aim is None else f"{aim}: {'met' if aim.met(figure) else 'missed'}"
        rows.append(f"{key:{width}}  {figure:>12,.4g}  {told}".rstrip())
    return "\n".join(rows)


def wanted(text: str | None) -> list[str]:
    """Return the parts that an option names, all of them where it does not stand.

    Raises:
        argparse.ArgumentTypeError: there is no such part.
    """
    names = part_names() if text is None else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in part_names()]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; there are {', '.join(part_names())}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for; return the exit code."""
    default = Options()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=wanted, default=part_names(), help="parts, with commas between them")
    parser.add_argument("--seconds", type=float, default=default.seconds, help="that one side is measured, once")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="how often each side is measured")
    parser.add_argument("--seed", type=int, default=default.seed)
    given = parser.parse_args(arguments)
    options = Options(seconds=given.seconds, rounds=given.rounds, seed=given.seed)
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
    failed: list[str] = []
    # With an engine beside it on few cores: one that gets no time for a while is not to be taken for dead.
    with apache_kafka(properties={"broker.session.timeout.ms": "60000"}) as broker:
        for name in given.only:
            try:
                mine, of_mine = run_part(name, broker, options)
            except Exception:  # the figures of the other parts are worth having
                traceback.print_exc()
                failed.append(name)
                continue
            figures |= {key: round(value, 4) for key, value in mine.items()}
            aims |= of_mine
    print(f"\n{table(figures, aims)}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    print(json.dumps(figures))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
