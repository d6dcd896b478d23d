"""Where a probe host goes on, and what it says about it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.protocol.host_position import (
    MAX_QUARANTINED,
    Committed,
    HostMetadata,
    Notice,
    Quarantined,
    resume_from,
)

FINGERPRINT = "ab" * 32


def committed(offset, emitted_up_to, fingerprint=FINGERPRINT):
    text = HostMetadata(emitted_up_to=emitted_up_to, fingerprint=fingerprint).to_text()
    return Committed(offset=offset, metadata=text)


def resumed(what, start=0, end=100, start_from="earliest"):
    found = resume_from(what, start, end, FINGERPRINT, start_from)
    return found.offset, found.emitted_up_to, [item.notice for item in found.declarations], found.commit_first


@pytest.mark.parametrize(
    ("what", "start", "end", "expected"),
    [
        pytest.param(committed(10, 40), 0, 100, (10, 40, [], True), id="goes on"),
        pytest.param(committed(10, 40), 10, 40, (10, 40, [], True), id="at both ends"),
        pytest.param(Committed(offset=10), 0, 100, (10, 10, [Notice.NO_METADATA], True), id="reset by an operator"),
        pytest.param(
            Committed(offset=10, metadata="{"), 0, 100, (10, 10, [Notice.NO_METADATA], True), id="unreadable metadata"
        ),
        pytest.param(
            Committed(offset=10, metadata='{"v":2,"e":40,"fp":""}'),
            0,
            100,
            (10, 10, [Notice.NO_METADATA], True),
            id="another version's metadata",
        ),
        pytest.param(committed(10, 40, "other"), 0, 100, (10, 40, [Notice.PROBES_CHANGED], True), id="other probes"),
        pytest.param(committed(10, 40), 20, 100, (20, 40, [Notice.OUT_OF_RANGE], True), id="the oldest stream is gone"),
        pytest.param(committed(10, 40), 50, 100, (50, 50, [Notice.OUT_OF_RANGE], True), id="unread records are gone"),
        pytest.param(committed(10, 40), 0, 30, (10, 30, [Notice.TRUNCATED], True), id="truncated below e"),
        pytest.param(committed(100, 100), 0, 100, (100, 100, [], False), id="there is nothing to read"),
        pytest.param(committed(10, 40), 0, 5, (5, 5, [Notice.TRUNCATED], True), id="truncated below the offset"),
        pytest.param(committed(40, 10), 0, 100, (40, 40, [], True), id="e is never below the offset"),
    ],
)
def test_a_committed_position_is_resolved_against_the_log(what, start, end, expected):
    assert resumed(what, start, end) == expected


@pytest.mark.parametrize(("start_from", "offset"), [("earliest", 7), ("latest", 90)])
def test_a_new_group_begins_where_it_was_told_and_commits_that_first(start_from, offset):
    assert resumed(None, 7, 90, start_from) == (offset, offset, [Notice.NEW_GROUP], True)


def test_a_loss_names_the_offsets_that_are_gone():
    [gap] = resume_from(committed(10, 40), 50, 100, FINGERPRINT, "earliest").declarations
    assert (gap.from_offset, gap.to_offset, gap.notice.is_loss) == (10, 50, True)
    [cut] = resume_from(committed(10, 40), 0, 30, FINGERPRINT, "earliest").declarations
    assert (cut.from_offset, cut.to_offset, cut.notice.is_loss) == (30, 40, True)


@given(emitted_up_to=st.integers(0, 2**62), fingerprint=st.text(max_size=200), stalled=st.integers(0, 9))
def test_metadata_comes_back_and_fits_far_below_the_brokers_limit(emitted_up_to, fingerprint, stalled):
    text = HostMetadata(emitted_up_to=emitted_up_to, fingerprint=fingerprint, stalled=stalled).to_text()
    assert len(text.encode()) < 500
    found = HostMetadata.from_text(text)
    assert found == HostMetadata(emitted_up_to=emitted_up_to, fingerprint=fingerprint[:16], stalled=stalled)


@given(text=st.one_of(st.none(), st.text(max_size=50), st.just("[]"), st.just('{"v":1}')))
def test_foreign_metadata_is_none_of_ours(text):
    assert HostMetadata.from_text(text) is None


@given(
    what=st.one_of(st.none(), st.tuples(st.integers(0, 50), st.integers(0, 50))),
    bounds=st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted),
    start_from=st.sampled_from(["earliest", "latest"]),
)
def test_a_position_always_lies_in_the_log(what, bounds, start_from):
    start, end = bounds
    found = resume_from(committed(*what) if what else None, start, end, FINGERPRINT, start_from)
    assert start <= found.offset <= found.emitted_up_to <= end


def test_as_many_quarantined_records_as_there_may_be_fit_into_what_a_broker_takes():
    first = 10**12
    items = tuple(Quarantined(first + 9999 * at, first + 10**8 + at) for at in range(MAX_QUARANTINED))
    metadata = HostMetadata(
        emitted_up_to=first + 10**9,
        fingerprint="f" * 64,
        stalled=99,
        in_hand=first,
        strikes=1,
        quarantined=items,
        states=9999,
        states_from=first,
    )
    assert len(metadata.to_text()) < 4096
    assert HostMetadata.from_text(metadata.to_text()).quarantined == items
