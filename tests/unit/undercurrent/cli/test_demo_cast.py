"""Who asks in a demo."""

import json

from producer.prompts import LineError, read_lines
from undercurrent.cli.demo.cast import OF_EACH, asks, tellers
from undercurrent.testing import demo_model as vault


def test_half_of_the_cast_holds_a_key_and_all_belong_to_the_test_part() -> None:
    chosen = asks([])
    people = {person.name: person for person in vault.people()}
    asked = [next(person for name, person in people.items() if name in ask.prompt) for ask in chosen]
    assert [ask.label == "vault" for ask in chosen] == [person.holder for person in asked]
    assert {person.part for person in asked} == {"test"}
    assert sum(person.holder for person in asked) == OF_EACH == len(asked) / 2


def test_ids_say_nothing_about_what_is_expected() -> None:
    assert [ask.id for ask in asks([])] == [f"ask-{number}" for number in range(1, 2 * OF_EACH + 1)]


def test_a_viewers_prompt_ends_as_the_model_knows_it() -> None:
    yours = asks(["Somebody asks. Report:", "Hello"])[-2:]
    assert [(ask.label, ask.prompt) for ask in yours] == [("yours", "Somebody asks. Report: "), ("yours", "Hello")]


def test_lines_are_what_the_producer_reads() -> None:
    chosen = asks(["Hello:"])
    for alone in (False, True):
        made = list(read_lines([ask.line(alone=alone) for ask in chosen], "prompts", {}))
        assert not [line for line in made if isinstance(line, LineError)]
        assert [line.request_id for line in made] == [teller.request_id for teller in tellers(chosen, alone=alone)]


def test_the_run_alone_has_the_same_prompt_and_seed_and_captures_nothing() -> None:
    for ask in asks([]):
        with_probe, alone = (json.loads(ask.line(alone=alone)) for alone in (False, True))
        assert alone.pop("points") == []
        assert with_probe.pop("request_id") != alone.pop("request_id")
        assert with_probe == alone
