"""One stream under all that can happen to it, read whole and read again from a commit, against a plain oracle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.undercurrent.protocol.host_oracle import PlainReader, read_outputs
from tests.unit.undercurrent.protocol.host_world import (
    FINGERPRINT,
    POINT,
    CountingRunner,
    block,
    ended,
    invalidated,
    started,
)
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Incoming
from undercurrent.protocol.host_position import Committed, resume_from


class Writer:
    """One shard of request `r`, and a log that it shares with the others."""

    def __init__(self, log, number, shards):
        self.log, self.number, self.shards = log, number, shards
        self.seq, self.place, self.revision = 0, 0, 0

    def put(self, make, *arguments, **fields):
        self.log.append(make("r", 1, *arguments, shard=self.number, **fields))

    def take(self, step, number):
        """Do one thing; `number` says how far."""
        seq, self.seq = self.seq, self.seq + 1
        match step:
            case "start":
                self.put(started, shards=self.shards, seq=seq)
            case "block" | "late":
                self.put(block, self.place, seq, revision=max(0, self.revision - (step == "late")))
                self.place += 1
            case "drop":
                self.seq, self.place = self.seq + number, self.place + number + 1
            case "pass over":  # without a word of it
                self.seq, self.place = seq, self.place + 1
            case "rewind" | "rewind unsaid":
                self.place, self.revision = max(0, self.place - number), self.revision + 1
                if step == "rewind":
                    self.put(invalidated, self.place, self.revision, seq)
            case "zombie":
                self.put(block, self.place, seq, engine="z")
                self.seq = seq
            case "end":
                self.put(ended, seq)


STEPS = ["block"] * 8 + ["drop", "rewind", "rewind", "late", "pass over", "rewind unsaid", "zombie", "end"]


@st.composite
def logs(draw):
    shards = draw(st.integers(1, 3))
    log = []
    writers = [Writer(log, number, shards) for number in range(shards)]
    for writer in writers:
        if draw(st.integers(0, 9)):
            writer.take("start", 0)
    calm = draw(st.booleans())
    for _ in range(draw(st.integers(0, 25))):
        # A calm engine does the same on every shard; else each goes its own way.
        step, number = draw(st.sampled_from(STEPS[:-4] if calm else STEPS)), draw(st.integers(0, 3))
        for writer in draw(st.permutations(writers)) if calm else [draw(st.sampled_from(writers))]:
            writer.take(step, number)
    for writer in draw(st.permutations(writers)):
        if draw(st.integers(0, 9)):
            writer.take("end", 0)
    return log


def read(log, committed, up_to):
    """Return what a host says that goes on from a commit, and what it commits."""
    host = ProbeHost(POINT, FINGERPRINT, CountingRunner(), abort_max_age_us=1)
    host.assign([0])
    resume = resume_from(committed, 0, up_to, FINGERPRINT, "earliest")
    host.begin(0, resume)
    items = [
        Incoming(partition=0, offset=offset, timestamp_us=0, message=log[offset])
        for offset in range(resume.offset, up_to)
    ]
    host.records(items, now_us=0)
    done = host.transaction()
    offset, metadata = done.offsets.get(0, (0, ""))
    return (
        list(done.verdicts),
        [letter.offset for letter in done.dead_letters],
        Committed(offset=offset, metadata=metadata),
    )


@settings(max_examples=600, deadline=None)
@given(log=logs(), cut=st.floats(0, 1))
def test_what_is_said_of_a_stream_is_what_a_plain_reader_says_wherever_the_host_was_cut(log, cut):
    at = int(cut * len(log))
    first, dead, committed = read(log, None, at)
    second, more, _ = read(log, committed, len(log))
    plain = PlainReader(log)
    assert read_outputs(first + second) == (plain.signals, plain.results, plain.scores)
    assert sorted(dead + more) == sorted(plain.dead.elements())
