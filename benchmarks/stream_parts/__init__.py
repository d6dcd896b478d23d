"""The parts of `benchmarks.streams`, one module each.

    AIMS = {"publish_ratio": Aim(">=", 0.7)}          # of the keys that have one; may be empty

    def measure(broker: Broker, options: Options) -> dict[str, float]:
        ...

A part makes its own topics on the broker, which it shares with the other parts of a run, prints what a reader wants to
see of how its figures came about, and leaves no process behind. Figures that are compared are of one run, their sides
in turn (`in_turn`): the machine is busier at one time than at another.
"""

from __future__ import annotations

import operator
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True, slots=True)
class Aim:
    """What a figure should be.

    Args:
        comparison: of the figure with the bound.
        bound: in the figure's own unit.
    """

    comparison: Literal[">=", "<"]
    bound: float

    def met(self, figure: float) -> bool:
        """Return whether a figure is what it should be."""
        return _COMPARISONS[self.comparison](figure, self.bound)

    def __str__(self) -> str:
        return f"{self.comparison} {self.bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What every part is told.

    Args:
        seconds: about how long one side is measured, once.
        rounds: how often each side is.
        seed: of every random choice.
    """

    seconds: float = 5.0
    rounds: int = 5
    seed: int = 1


def in_turn(sides: Mapping[str, Callable[[], float]], options: Options) -> dict[str, list[float]]:
    """Return what each side gave, round by round; within a round the order is shuffled.

    Args:
        sides: by name, what measures it once.
        options: rounds and seed.
    """
    rng, found = random.Random(options.seed), dict[str, list[float]]()
    for _ in range(options.rounds):
        names = list(sides)
        rng.shuffle(names)
        for name in names:
            found.setdefault(name, []).append(sides[name]())
    return found


def ratio(found: Mapping[str, list[float]], side: str, to: str) -> float:
    """Return the median, over rounds, of one side's figure to another's of the same round."""
    return statistics.median(a / b for a, b in zip(found[side], found[to], strict=True))
