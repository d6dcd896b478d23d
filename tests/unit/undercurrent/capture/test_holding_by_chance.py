"""Readers, drivers and engines late as chance has it: every row before an end comes once, and none after it."""

import random

import pytest

from tests.unit.undercurrent.capture.holding_scene import Scene, point


class Chance:
    """Requests that come, go, grow and are read at random."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        bound = self.rng.choice([1 << 20, 4000])
        self.scene = Scene(point("p"), point("q", stride=2), max_bytes=bound, blocking=("p", "q"))
        self.live, self.lengths, self.ended, self.number = {}, {}, {}, 0

    def come(self):
        self.number += 1
        name, n, prompt = f"r{self.number}", self.rng.randint(1, 2), self.rng.randint(1, 5)
        slot = self.scene.table.take(n)
        for index in range(n):
            _, run = self.scene.open(name, slot=slot, n=n, index=index, prompt_len=prompt)
            self.live[run] = (name, slot, index, prompt)
            self.lengths[run] = prompt

    def compute(self):
        computed, chosen = self.scene.computed, [run for run in self.live if self.rng.random() < 0.8]
        counts = {r: self.live[r][3] if computed[r] == 0 else self.rng.choice([1, 1, 1, 3]) for r in chosen}
        if counts:
            self.scene.step(counts)

    def hear(self, run):
        """The driver hears of more tokens, or of the last ones."""
        name, slot, index, _ = self.live[run]
        most = max(self.lengths[run], self.scene.computed[run] + 1)
        self.lengths[run] = self.rng.randint(self.lengths[run], most)
        done = self.rng.random() < 0.1
        self.scene.table.tell(slot, index, self.lengths[run], final=done)
        if done:
            self.ended[run] = (name, index, self.lengths[run])

    def close(self, run):
        name, slot, index, _ = self.live.pop(run)
        self.ended.setdefault(run, (name, index, self.lengths[run]))
        self.scene.table.tell(slot, index, self.ended[run][2], final=True)
        self.scene.tracker.close(run)

    def turn(self):
        if len(self.live) < 6 and self.rng.random() < 0.3:
            self.come()
        self.compute()
        for run in list(self.live):
            if run in self.ended and self.rng.random() < 0.4:
                self.close(run)
            elif run not in self.ended and self.rng.random() < 0.6:
                self.hear(run)
        if self.rng.random() < 0.7:
            self.scene.read()


@pytest.mark.parametrize("seed", range(12))
def test_every_row_before_the_end_comes_once_and_none_after_it_whoever_is_slow(seed):
    chance = Chance(seed)
    for _ in range(150):
        chance.turn()
    for run in list(chance.live):
        chance.close(run)
    scene = chance.scene
    for _ in range(3):
        scene.read()
    assert scene.holding.waiting == 0
    found = scene.streams()
    assert len(chance.ended) > 10
    for run, (name, index, length) in chance.ended.items():
        real = range(min(length, scene.computed[run]))
        for at, stride in (("p", 1), ("q", 2)):
            rows, closed, losses = found[name, 1, index, at]
            assert (rows, losses) == (list(real[::stride]), [])
            assert (closed.emitted, closed.last_pos) == (len(rows), rows[-1] if rows else -1)
