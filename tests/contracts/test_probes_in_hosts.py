"""Every built-in probe in a live host and in a replay of what it read: equal bit for bit, whatever the batches.

The live run hands its partition over in the middle, as in a rebalance. The streams have a gap, a drop, a cached prefix,
a value that is not finite and an outlier dimension.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.decoding import incoming
from probe_consumers.replay import Replay, Span, comparable
from probe_consumers.runner import BindingRunner
from tests.contracts.probe_cases import BATCH_CASES, CASES, LAYERS, PROMPT_LEN, WIDTH, counts_generated_alone
from undercurrent.codec import Codec, as_array
from undercurrent.codec import positions as positions_of
from undercurrent.core import StreamFacts
from undercurrent.evaluation.dataset import RequestBlock
from undercurrent.evaluation.diff import collect, compare
from undercurrent.evaluation.scoring import score_requests
from undercurrent.kafka.records import Record
from undercurrent.probes import Binding, LoadedProbe
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_position import Committed, Resume, resume_from
from undercurrent.protocol.host_states import Keeping
from undercurrent.protocol.messages import ActivationBlock, StreamStarted, VerdictKind
from undercurrent.testing import drive, make_records
from undercurrent.testing.streams import StreamBuilder

CODEC = Codec()
TOKENS = 9


def bound(name):
    factory = CASES[name]
    sample = factory.spawn("", "")
    fingerprint = getattr(sample, "fingerprint", name)
    loaded = LoadedProbe(factory=factory, sample=sample, fingerprint=fingerprint)
    return Bound(Binding(name=name, point="residual", probe="p"), loaded)


def stream_values(name, seed):
    """Return the messages of one stream; its name says what is wrong with it."""
    cached = 2 if name == "cached" else 0
    stream = StreamBuilder(
        name, layers=LAYERS, width=WIDTH, dtype="bfloat16", prompt_len=PROMPT_LEN, cached_prefix=cached
    )
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(TOKENS, len(LAYERS), WIDTH)) * 1.5
    if name == "nan":
        rows[5, 1, 3] = np.nan
    if name == "outlier":
        rows[:, :, 2] *= 1000
    values = [stream.start()]
    for start, stop in itertools.pairwise([cached, PROMPT_LEN, *range(PROMPT_LEN + 1, TOKENS + 1)]):
        if name == "gap" and start == 5:
            stream.skip()
        elif name != "dropped" or start != 5:
            values.append(stream.block(list(range(start, stop)), rows[start:stop]))
    values.append(stream.end(dropped=2 if name == "dropped" else 0))
    return stream.key, values


def make_log(seed):
    """Return the records of one partition, the streams' in turn."""
    streams = [stream_values(name, seed + at) for at, name in enumerate(PARTIAL)]
    rounds = itertools.zip_longest(*([(key, value) for value in values] for key, values in streams))
    log = [item for turn in rounds for item in turn if item is not None]
    return [incoming(CODEC, Record("t", 0, at, key, value, 1_000, ())) for at, (key, value) in enumerate(log)]


# Whether the verdict is partial: of a probe that counts generated tokens alone, of other stored ones, of a function.
PARTIAL = {
    "plain": (False, False, False),
    "gap": (True, True, False),
    "dropped": (True, True, True),
    "cached": (False, True, True),
    "outlier": (False, False, False),
    "nan": None,
}


def live_run(name, records, cuts, handover, state_after=None):
    bounds = [bound(name)]
    prints = set_fingerprint(bounds)
    found, offset, resume, states = [], 0, Resume(offset=0, emitted_up_to=0), {}
    keeping = None if state_after is None else Keeping(checkpoint_after_bytes=state_after)
    for end in (handover, len(records)):
        host = ProbeHost("residual", prints, BindingRunner(bounds, "live", lambda: 5), 10**18, keeping=keeping)
        host.assign([0])
        # As they stand on their topic.
        written = [CODEC.decode(CODEC.encode(item)) for item in states.values() if item is not None]
        host.begin(0, resume, written if resume.states else ())
        offset = resume.offset
        for start, stop in itertools.pairwise([offset, *(cut for cut in cuts if offset < cut < end), end]):
            host.records(records[start:stop], 0)
            transaction = host.transaction()
            found += transaction.verdicts
            states |= transaction.states
        at, metadata = transaction.offsets[0]
        resume = resume_from(Committed(offset=at, metadata=metadata), 0, len(records), prints, "earliest")
    return found


def replayed(name, records, cuts):
    spans = {0: Span(0, len(records))}
    run = Replay("residual", [bound(name)], spans, lambda: 7)
    found = []
    for start, stop in itertools.pairwise([0, *cuts, len(records)]):
        found += run.feed(records[start:stop])
    return run, found, spans


def report(live, run, found, spans):
    mine, theirs = comparable(live, found, run.edges(), spans)
    return compare(collect(mine), collect(theirs))


def draw_cuts(data, count):
    return sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=12)))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**20), state_after=st.sampled_from([None, 1, 500, 2000]), data=st.data())
def test_a_replay_says_what_the_live_run_said_bit_for_bit(name, seed, state_after, data):
    records = make_log(seed)
    handover = data.draw(st.integers(1, len(records) - 1))
    live = live_run(name, records, draw_cuts(data, len(records)), handover, state_after)
    found = report(live, *replayed(name, records, draw_cuts(data, len(records))))
    assert found.equal, found.differences
    assert found.verdicts_compared == len(PARTIAL)
    assert found.scores_compared >= (len(PARTIAL) - 1) * (TOKENS - 3)


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_from_a_state_written_after_every_record(name):
    records = make_log(2)
    for handover in range(1, len(records), 7):
        live = live_run(name, records, range(1, len(records)), handover, state_after=1)
        found = report(live, *replayed(name, records, []))
        assert found.equal, (handover, found.differences)


@pytest.mark.parametrize("name", BATCH_CASES)
def test_a_flipped_bit_is_a_difference(name):
    records = make_log(1)
    live = live_run(name, records, [7], 20)
    at = next(i for i, item in enumerate(records) if i > 12 and item.message.request_id == "plain")
    block = records[at].message
    data = bytearray(block.data)
    data[-1] ^= 0x40
    records[at] = records[at]._replace(message=replace(block, data=bytes(data)))
    found = report(live, *replayed(name, records, []))
    assert not found.equal
    assert {item.request_id for item in found.differences} == {"plain"}


@pytest.mark.parametrize("name", CASES)
def test_each_stream_ends_with_its_own_last_word(name):
    _, found, _ = replayed(name, make_log(3), [11, 30])
    words = {item.request_id: item for item in found if item.kind in (VerdictKind.RESULT, VerdictKind.ERROR)}
    column = 2 if name == "function" else 0 if counts_generated_alone(CASES[name]) else 1
    assert {key: word.partial for key, word in words.items() if key != "nan"} == {
        key: told[column] for key, told in PARTIAL.items() if told
    }
    assert words.pop("nan").kind is VerdictKind.ERROR
    assert {word.kind for word in words.values()} == {VerdictKind.RESULT}
    assert all("partial" not in word.metadata for word in words.values())


@pytest.mark.parametrize("name", CASES)
def test_streams_scored_together_say_what_each_says_alone(name):
    records = make_log(5)
    _, together, _ = replayed(name, records, [])
    for request in PARTIAL:
        mine = [item for item in records if item.message.request_id == request]
        _, alone, _ = replayed(name, mine, [])
        told, expected = (
            {key: (item.scores, [(w.kind, w.verdict, w.score, w.token_pos) for w in item.last_words])
             for key, item in collect(verdicts).items() if key.request_id == request}
            for verdicts in (together, alone)
        )  # fmt: skip
        assert told == expected


@pytest.mark.parametrize("name", BATCH_CASES)
def test_a_host_scores_each_row_as_the_probe_alone_does(name):
    _, found, _ = replayed(name, make_log(6), [])
    told = next(item for key, item in collect(found).items() if key.request_id == "plain")
    _, values = stream_values("plain", 6)
    blocks = [item for value in values if isinstance(item := CODEC.decode(value), ActivationBlock)]
    rows = np.concatenate([as_array(block) for block in blocks])
    records = make_records(rows, layers=LAYERS, prompt_len=PROMPT_LEN, dtype="bfloat16")
    driven = drive(CASES[name], records, blocks=len(rows))
    assert told.scores == {at: int(np.float32(score).view(np.uint32)) for at, score in driven.scores.items()}
    assert told.last_words[0].score == driven.result.metadata["score"]


def as_request(name, seed):
    """Return a stream as a dataset gives it."""
    messages = [CODEC.decode(value) for value in stream_values(name, seed)[1]]
    blocks = [item for item in messages if isinstance(item, ActivationBlock)]
    started = next(item for item in messages if isinstance(item, StreamStarted))
    places, rows = (np.concatenate([part(block) for block in blocks]) for part in (positions_of, as_array))
    facts = {key: getattr(started, key) for key in ("prompt_len", "layers", "width", "tensor_type", "cached_prefix")}
    return RequestBlock(
        request_id=name,
        attempt=started.attempt,
        index=started.index,
        split="test",
        group="g",
        label="unknown",
        positions=places,
        is_generated=places >= PROMPT_LEN,
        token_ids=np.full(len(places), -1, np.int32),
        rows={layer: rows[:, at] for at, layer in enumerate(LAYERS)},
        stream=StreamFacts(**facts),
    )


@pytest.mark.parametrize("name", CASES)
def test_what_a_dataset_is_scored_with_is_what_a_host_says(name):
    """Scores of tokens bit for bit, the token that decides, the last word, and what a probe raised."""
    acted = 0
    for seed in range(4):
        _, found, _ = replayed(name, make_log(seed), [])
        frame = score_requests(bound(name).loaded, [as_request(kind, seed + at) for at, kind in enumerate(PARTIAL)],
                               keep_tokens=True)  # fmt: skip
        hosts = {key.request_id: item for key, item in collect(found).items()}
        for kind, row in frame.iterrows():
            mine = [item for item in found if item.request_id == kind]
            signals = [item.token_pos for item in mine if item.kind is VerdictKind.SIGNAL]
            assert [row["decided_at"]] * len(signals) == signals
            assert bool(signals) == (not np.isnan(row["score"]) and row["score"] >= threshold_of(name))
            acted += bool(signals)
            word = hosts[kind].last_words[0]
            if name == "function":  # a host names the record, which a dataset does not know
                assert ("not finite" in row["error"]) == (word.kind is VerdictKind.ERROR)
            else:
                assert row["error"] == (word.error or "").removeprefix("ProbeError: ")
            aggregates = row["token_aggregates"][np.isfinite(row["token_aggregates"])]
            if word.kind is VerdictKind.RESULT and name != "function":
                assert (aggregates[-1] if len(aggregates) else None) == word.score
            if name not in ("function", "ensemble", "ensemble-coherent") and kind != "nan":
                theirs = {at: bits for (at, layer), bits in hosts[kind].scores.items() if layer == LAYERS[1]}
                told = dict(zip(row["token_positions"].tolist(), row["token_scores"].view(np.uint32), strict=True))
                assert told.items() <= theirs.items()
    assert acted


def threshold_of(name):
    artefact = CASES[name].probe_kwargs.get("artefact")
    return 3.0 if artefact is None else artefact.config.threshold
