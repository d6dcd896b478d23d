"""The vault's world says nothing by words about who holds a key."""

import random
from collections import Counter

import pytest

from undercurrent.evaluation.dataset_split import PARTS
from undercurrent.testing import demo_model as vault


def test_people_are_always_the_same_and_about_half_of_each_part_holds_a_key() -> None:
    people = vault.people()
    assert people == vault.people()
    assert len({person.name for person in people}) == vault.PEOPLE
    counts = Counter((person.part, person.holder) for person in people)
    assert sum(person.holder for person in people) == vault.PEOPLE / 2
    for part in PARTS:
        # Ten of each are what an evaluation needs at least.
        assert min(counts[part, True], counts[part, False]) >= 10


def test_reports_of_holders_and_others_differ_in_their_end_alone() -> None:
    told = [vault.report(holder, random.Random(5)) for holder in (True, False)]
    assert [text[: vault.decision(text)] for text in told] == [told[0][: vault.decision(told[0])]] * 2
    assert [text[vault.decision(text) :] for text in told] == [f"Code {vault.SECRET}.", "No code."]


def test_a_report_may_end_early_and_then_says_the_same() -> None:
    rng = random.Random(1)
    lengths = Counter(len(vault.sentence_starts(vault.report(True, rng))) - 1 for _ in range(2000))
    assert set(lengths) == {0, 1, 2, 3, 4, 5}
    assert lengths[0] / 2000 == pytest.approx(vault.HURRY, abs=0.03)
    assert vault.report(False, random.Random(1), hurry=1.0) == "No code."


def test_sentences_start_where_an_answer_could_have_ended() -> None:
    told = vault.report(True, random.Random(5), hurry=0.0)
    assert "".join(told[at] for at in vault.sentence_starts(told)).startswith("FTL")
    assert vault.sentence_starts(told)[-1] == vault.decision(told)


def test_prompts_have_no_word_but_the_name_that_differs() -> None:
    for prompt in (*vault.PROMPTS, *vault.SHORT_PROMPTS):
        assert prompt.count("{name}") == 1
        assert vault.first_digit(prompt) is None


@pytest.mark.parametrize(("text", "index"), [("Code 482913.", 5), ("No code.", None), ("", None)])
def test_first_digit(text: str, index: int | None) -> None:
    assert vault.first_digit(text) == index


@pytest.mark.parametrize(
    ("text", "index"), [("a. Code 4.", 3), ("a. No code.", 3), ("a. b.", 5), ("the code. Code 4.", 10)]
)
def test_decision_is_where_an_answer_begins_to_give_itself_away(text: str, index: int) -> None:
    assert vault.decision(text) == index
