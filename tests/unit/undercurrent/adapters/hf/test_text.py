"""Tokens to text: the pieces together are the text, and no piece ends in half a character or holds a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.adapters.hf.text import Detokenizer, StopText

MARK = "\ufffd"


def decode(ids):
    """A token is a byte, as with a byte-level tokenizer."""
    return bytes(ids).decode(errors="replace")


def pieces(data, context=b"", decode=decode):
    detokenizer = Detokenizer(decode, list(context))
    return [detokenizer.push(token) for token in data]


@given(st.text(max_size=40), st.text(max_size=10))
def test_the_pieces_of_a_text_are_the_text_and_each_is_whole(text, prompt):
    text = text.replace(MARK, "")
    given = pieces(text.encode(), prompt.encode())
    assert "".join(given) == text
    assert MARK not in "".join(given)


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_give_what_decoding_them_at_once_gives_up_to_an_open_end(data):
    given = "".join(pieces(data))
    whole = decode(data)
    assert whole.startswith(given)
    assert set(whole[len(given) :]) <= {MARK}
    assert len(whole) - len(given) <= 3


def test_a_character_comes_with_its_last_byte():
    assert pieces("a€b".encode()) == ["a", "", "", "€", "b"]


def test_a_long_run_of_broken_bytes_is_not_held_back_for_ever():
    assert "".join(pieces(b"\x80" * 20)) == MARK * 17


def words(ids):
    """A decoder that drops the blank before the first word, as sentencepiece's do."""
    return "".join(f" w{token}" for token in ids).removeprefix(" ")


def test_the_blank_before_the_first_generated_word_is_kept():
    assert "".join(pieces([7, 8, 9], [1, 2], words)) == " w7 w8 w9"


def test_a_text_without_a_prompt_begins_as_the_decoder_begins_it():
    assert "".join(pieces([7, 8], [], words)) == "w7 w8"


def test_the_window_stays_short():
    longest = 0

    def watched(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    pieces(b"x" * 500, b"y" * 500, watched)
    assert longest <= 8


def streamed(parts, stop):
    filter_ = StopText(stop)
    out = [filter_.push(part) for part in parts]
    return out, filter_


def test_a_stop_string_over_several_pieces_ends_the_text_before_it():
    out, filter_ = streamed(["say ", "EN", "D of", " it"], ["END"])
    assert "".join(out) == "say "
    assert filter_.stopped


def test_what_only_began_like_a_stop_string_comes_later():
    out, filter_ = streamed(["EN", "T", "E"], ["END"])
    assert out == ["", "ENT", ""]
    assert not filter_.stopped
    assert filter_.flush() == "E"
    assert filter_.flush() == ""


def test_the_earliest_of_several_stop_strings_counts():
    out, _ = streamed(["abcdef"], ["ef", "cd"])
    assert out == ["ab"]


def test_without_stop_strings_nothing_is_held_back():
    assert streamed(["a", "b"], [])[0] == ["a", "b"]


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_any_cutting_of_a_text_gives_what_the_whole_gives(parts, stop):
    text = "".join(parts)
    out, filter_ = streamed(parts, stop)
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    assert filter_.stopped is bool(found)
    given = "".join(out) + filter_.flush()
    if not found:
        assert given == text
    else:
        # Pieces that came later cannot take back an earlier end, so the first stop string that was complete counts.
        assert text.startswith(given)
        assert any(text[len(given) :].startswith(s) for s in stop)
        assert not any(s in given for s in stop)


@pytest.mark.parametrize("stop", [["aaa"], ["ab", "b"]])
def test_a_text_never_holds_a_stop_string(stop):
    out, _ = streamed(list("aabaaaab"), stop)
    assert not any(s in "".join(out) for s in stop)
