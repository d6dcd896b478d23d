"""Hosts that join points, under fire: what they write follows from the logs alone, each output once."""

from __future__ import annotations

import random

import pytest

from tests.unit.undercurrent.protocol.join_story import POINTS, SECOND, Story
from tests.unit.undercurrent.protocol.join_world import Fleet, read_outputs, run
from undercurrent.protocol.host_states import Keeping
from undercurrent.protocol.join_cut import Past
from undercurrent.protocol.join_evidence import Restarts
from undercurrent.protocol.join_key import JoinKey
from undercurrent.protocol.join_number import NumberJoin
from undercurrent.protocol.joining_host import JoiningHost


@pytest.mark.parametrize(
    ("seeds", "options"),
    [
        (range(60), {}),
        (range(15), {"points": 3, "fire": 350}),
        (range(12), {"numbers": 2, "steps": 120, "fire": 500}),
    ],
    ids=["two points", "three points", "two numbers"],
)
def test_outputs_follow_from_the_logs_alone_and_come_once(seeds, options):
    """Two members, any interleaving, crashes and rebalances anywhere: each request is said what its logs say of it."""
    for seed in seeds:
        run(seed, **options)


def test_requests_that_end_at_the_rebuild_limit_end_at_the_same_row_whatever_the_order():
    limited = 0
    for seed in [*range(8), 21, 77]:
        rng = random.Random(seed)
        story = Story(rng, POINTS[:2], 1, 80)
        keeping = Keeping(checkpoint_after_bytes=400, max_replay_bytes=rng.choice([800, 1500]), service="s")
        said = []
        for fire in (0, 300):
            fleet = Fleet(random.Random(seed + fire), POINTS[:2], story.logs, 1, keeping=keeping)
            fleet.under_fire(fire)
            fleet.to_the_end()
            said.append(read_outputs(fleet.verdicts))
        assert said[0] == said[1]
        assert set(said[0][1].values()) == {1}
        limited += sum("rebuild_limit" in result for result in said[0][1])
    assert limited > 20


class NeverBack(Story):
    """Its engines end what they have begun and never start again: some points get no stream, and no word of it."""

    def step(self):
        self.now += self.rng.choice([0, 0, 0, 0, 0, 0, 150 * SECOND])
        super().step()

    def die(self, engine):
        for key in [key for key in self.keys if key.engine == engine]:
            self.end(key)

    restart = die

    def end_all(self):
        for key in list(self.keys):
            self.end(key)
        for _ in range(3):
            self.now += 700 * SECOND
            for point, number in sorted(self.logs):
                self.add(point, number, None)


def test_requests_that_no_record_ends_end_with_the_time_of_the_logs_whatever_the_order():
    late = 0
    for seed in range(12):
        story = NeverBack(random.Random(seed), POINTS[:2], 1, 70)
        said = []
        for fire in (0, 250):
            fleet = Fleet(random.Random(seed + fire), POINTS[:2], story.logs, 1)
            fleet.under_fire(fire)
            fleet.to_the_end(all_end=False)
            signals, results, rows = read_outputs(fleet.verdicts)
            assert set(results.values()) == {1}
            # Which record told the time is told by where the reader began.
            said.append((signals, {(name, *fields) for name, _, *fields in results}, rows))
        assert said[0] == said[1]
        assert len({name for name, *_ in said[0][1]}) == len(said[0][1])
        late += sum("lost" in result for result in said[0][1])
    assert late > 10


def test_the_stories_hold_what_they_should():
    """Else the test above would say nothing: all ends, whole results and broken ones."""
    reasons, whole = set(), 0
    for seed in range(12):
        fleet, _ = run(seed, fire=100)
        results = [item for item in fleet.verdicts if item.end_reason]
        reasons |= {item.end_reason for item in results}
        whole += sum(item.complete and item.scored > 2 for item in results)
    assert reasons == {"finished", "lost", "superseded", "conflict", "rewound"}
    assert whole > 10


def seen_to_fail(limit=60):
    for seed in range(limit):
        try:
            run(seed)
        except (AssertionError, KeyError):
            return True
    return False


def no_gap_counts(key, stream, heads, pieces, count, arrived=JoinKey._arrived):
    for _, item in heads:
        item.clear_up_to = 1 << 20
    return arrived(key, stream, heads, pieces, count)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Past, "cut", lambda past, lows: tuple(lows)),
        (NumberJoin, "_written", lambda join, offsets: offsets[0] < join._emit_from[0]),
        (JoiningHost, "_rebuilt", lambda host, number: None),
        (NumberJoin, "hold", lambda join, side: None),
        (Restarts, "take_settled", lambda restarts: []),
        (Restarts, "shown", lambda restarts, *of: iter(())),
        (JoinKey, "_arrived", no_gap_counts),
    ],
    ids=["cut", "silent", "rebuilding", "hold", "settled", "restart", "gap"],
)
def test_without_one_of_the_rules_it_fails(monkeypatch, owner, name, broken):
    monkeypatch.setattr(owner, name, broken)
    assert seen_to_fail()
