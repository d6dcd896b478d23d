"""A replay against what a live host said: equal only where every bit and every record is the same."""

from __future__ import annotations

import numpy as np
import pytest

from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.decoding import incoming
from probe_consumers.replay import Replay, Span, comparable
from probe_consumers.replay_range import parse_offsets, parse_time
from probe_consumers.replay_tables import score_batch, verdict_batch
from probe_consumers.runner import BindingRunner
from undercurrent.codec import Codec
from undercurrent.errors import ConfigError
from undercurrent.evaluation.diff import collect, compare
from undercurrent.kafka.records import Record
from undercurrent.probes import Binding, LinearProbe, LoadedProbe
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_position import Resume
from undercurrent.protocol.messages import VerdictKind
from undercurrent.testing.streams import StreamBuilder

CODEC = Codec()
BLOCKS = 8


def bound():
    probe = LinearProbe.from_arrays(
        [1.0, -2.0, 0.5, 0.25], 0.0, layer=0, tensor_type="residual_stream", threshold=1.5, aggregation={"kind": "mean"}
    )
    loaded = LoadedProbe(
        factory=LinearProbe.factory(artefact=probe.artefact), sample=probe, fingerprint=probe.fingerprint
    )
    return Bound(Binding(name="guard", point="residual", probe="p"), loaded)


def make_log(names=("a", "b", "c"), ended=True):
    rng = np.random.default_rng(3)
    streams = [StreamBuilder(name, dtype="bfloat16") for name in names]
    values = [(stream.key, stream.start()) for stream in streams]
    for at in range(BLOCKS):
        values += [(stream.key, stream.block([at], rng.normal(size=4))) for stream in streams]
    return values + [(stream.key, stream.end()) for stream in streams] if ended else values


def records(log, first=0):
    return [incoming(CODEC, Record("t", 0, first + at, key, value, 1_000, ())) for at, (key, value) in enumerate(log)]


def live_run(log, first=0):
    """What a live host says, with a transaction after every third record."""
    bounds = [bound()]
    host = ProbeHost("residual", set_fingerprint(bounds), BindingRunner(bounds, "live", lambda: 5), 10**18)
    host.assign([0])
    host.begin(0, Resume(offset=first, emitted_up_to=first))
    found = []
    for item in records(log, first):
        host.records([item], 0)
        if item.offset % 3 == 0:
            found += host.transaction().verdicts
    return found + list(host.transaction().verdicts)


def replayed(log, first=0, start=None, end=None):
    start = first if start is None else start
    spans = {0: Span(start, first + len(log) if end is None else end)}
    run = Replay("residual", [bound()], spans, lambda: 7)
    found = []
    inside = [item for item in records(log, first) if spans[0].start <= item.offset < spans[0].end]
    for at in range(0, len(inside), 5):
        found += run.feed(inside[at : at + 5])
    return run, found, spans


def report(live, run, found, spans):
    mine, theirs = comparable(live, found, run.edges(), spans)
    return compare(collect(mine), collect(theirs))


def test_the_same_records_say_the_same_bit_for_bit():
    log = make_log()
    found = report(live_run(log), *replayed(log))
    assert (found.equal, found.verdicts_compared, found.scores_compared) == (True, 3, 3 * BLOCKS)


def test_every_flipped_bit_that_a_score_can_show_is_a_difference():
    log = make_log()
    live = live_run(log)
    at = 3 + 4 * 3
    key, value = log[at]
    for byte in range(len(value) - 8, len(value)):
        changed = bytearray(value)
        changed[byte] ^= 0x40
        found = report(live, *replayed([*log[:at], (key, bytes(changed)), *log[at + 1 :]]))
        assert not found.equal
        assert found.differences_total >= 1
        assert {item.request_id for item in found.differences} == {key.decode()}


@pytest.mark.parametrize("at", range(3 + 3 * BLOCKS + 3))
def test_every_removed_record_is_a_difference(at):
    log = make_log()
    live = live_run(log)
    bounds, inside = {0: Span(0, len(log))}, [item for item in records(log) if item.offset != at]
    run = Replay("residual", [bound()], bounds, lambda: 7)
    found = report(live, run, run.feed(inside), bounds)
    assert (found.equal, found.empty) == (False, False)
    assert {item.request_id for item in found.differences} == {log[at][0].decode()}


def test_an_empty_range_is_empty_never_equal():
    log = make_log()
    found = report(live_run(log), *replayed(log, start=0, end=0))
    assert (found.equal, found.empty) == (False, True)


def test_streams_that_the_range_cuts_are_named_and_not_compared():
    log = [*make_log(("old",)), *make_log(), *make_log(("young",), ended=False)]
    live = live_run(log)
    run, found, spans = replayed(log, start=4, end=len(log))
    edges = run.edges()
    assert [name.request_id for name in edges.started_before] == ["old"]
    assert [name.request_id for name in edges.unfinished] == ["young"]
    outcome = report(live, run, found, spans)
    assert (outcome.equal, outcome.verdicts_compared) == (True, 3)


def test_a_removed_end_is_no_edge_when_the_live_run_saw_it():
    log = make_log(("a",))
    live = live_run(log)
    assert any(item.kind is VerdictKind.RESULT for item in live)
    spans = {0: Span(0, len(log))}
    run = Replay("residual", [bound()], spans, lambda: 7)
    outcome = report(live, run, run.feed(records(log[:-1])), spans)
    assert [item.what for item in outcome.differences] == ["absent_replay"]


def test_streams_in_the_range_that_no_live_verdict_speaks_of_are_a_difference():
    log = make_log()
    live = [item for item in live_run(log) if item.request_id != "b"]
    outcome = report(live, *replayed(log))
    assert [(item.request_id, item.what) for item in outcome.differences] == [("b", "absent_live")]


@pytest.mark.parametrize("come_to", range(3 + 3 * BLOCKS + 3 + 1))
def test_what_a_host_has_not_come_to_is_no_difference_and_what_it_should_have_said_is(come_to):
    log = make_log()
    live = live_run(log[:come_to])
    run, found, spans = replayed(log)
    mine, theirs = comparable(live, found, run.edges(), spans)
    outcome = compare(collect(mine), collect(theirs), judged_up_to={0: come_to})
    ahead = {key.decode() for key, _ in log[-3:][max(0, come_to - len(log) + 3) :]}
    assert (outcome.differences_total, {item.request_id for item in outcome.waiting}) == (0, ahead)
    assert outcome.verdicts_compared == 3 - outcome.not_judged_yet == 3 - len(ahead)
    # It says that it has come to the end, and has not said everything.
    claimed = compare(collect(mine), collect(theirs), judged_up_to={0: len(log)})
    assert {item.request_id for item in claimed.differences} == ahead
    assert all(item.what == "absent_live" for item in claimed.differences)


def test_verdicts_and_scores_become_rows():
    _, found, _ = replayed(make_log())
    scores = score_batch(found).to_pylist()
    assert len(scores) == 3 * BLOCKS
    told = collect(found)
    for row in scores:
        [telling] = [item for name, item in told.items() if name.request_id == row["request_id"]]
        bits = int(np.float32(row["score"]).view(np.uint32))
        assert telling.scores[row["token_pos"], row["layer"]] == bits
    verdicts = verdict_batch(found).to_pylist()
    assert [row["request_id"] for row in verdicts if row["kind"] == "result"] == ["a", "b", "c"]


def test_times_are_iso_8601_in_utc_or_unix_seconds():
    assert parse_time("1970-01-01T00:00:01") == parse_time("1.0") == parse_time("1970-01-01T01:00:01+01:00") == 1000
    with pytest.raises(ConfigError, match="ISO 8601"):
        parse_time("yesterday")
    for text in ("inf", "-5", "1e300", "0001-01-01"):
        with pytest.raises(ConfigError, match="from 1970 to 9999"):
            parse_time(text)


def test_offsets_are_of_every_partition_or_of_one():
    assert parse_offsets(["5", "2:7"]) == {None: 5, 2: 7}
    with pytest.raises(ConfigError, match="PARTITION:OFFSET"):
        parse_offsets(["x"])
    for text in ("-1", "2:-1", str(2**63)):
        with pytest.raises(ConfigError, match=r"--to-offset .*: an offset is 0 or more, and has 63 bits"):
            parse_offsets([text], "--to-offset")
