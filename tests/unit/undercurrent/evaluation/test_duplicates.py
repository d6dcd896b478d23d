"""Duplicates are found however they are written, and templates are none."""

import numpy as np

from undercurrent.evaluation.duplicates import find_duplicates, normalised


def _words(seed: int, n: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [f"w{number}" for number in rng.integers(100_000, size=n)]


def test_case_punctuation_and_encoding_make_no_difference() -> None:
    assert normalised("Héllo,  WORLD!\u00a0\ufb01") == normalised("héllo world fi")
    found = find_duplicates(["Open the door.", "open THE door", "open the window"])
    assert found.exact[0] == found.exact[1] != found.exact[2]
    assert found.near[0] == found.near[1] != found.near[2]


def test_thirteen_words_in_a_row_are_near_duplicates_and_twelve_are_not() -> None:
    shared = _words(1, 13)
    texts = [" ".join(_words(2, 20) + shared), " ".join(shared + _words(3, 20)), " ".join(shared[:12] + _words(4, 20))]
    found = find_duplicates(texts)
    assert found.near[0] == found.near[1] != found.near[2]
    assert len(set(found.exact)) == 3


def test_nearness_is_passed_on() -> None:
    a, b = _words(1, 13), _words(2, 13)
    found = find_duplicates([" ".join(a), " ".join([*a, *b]), " ".join(b)])
    assert len(set(found.near)) == 1


def test_a_template_that_many_share_joins_nobody() -> None:
    template = " ".join(_words(1, 40))
    texts = [f"{template} {' '.join(_words(10 + number, 20))}" for number in range(100)]
    texts[99] = texts[98] + " and more"
    found = find_duplicates(texts)
    assert found.common_passages >= 28
    assert len(set(found.near[:99])) == 99
    assert found.near[98] == found.near[99]


def test_copies_of_one_text_are_duplicates_however_many() -> None:
    text = " ".join(_words(1, 30))
    assert len(set(find_duplicates([text] * 60 + [" ".join(_words(2, 30))] * 3).near)) == 2


def test_no_text_is_a_duplicate_of_nothing() -> None:
    found = find_duplicates([None, "", "?!", None])
    assert len(set(found.near)) == 4
