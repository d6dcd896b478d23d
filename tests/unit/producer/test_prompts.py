from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.prompts import LineError, Prompt, check, new_request_id, read_lines
from undercurrent.codec.avro import Codec


def read(*lines: str, **defaults: Any) -> list[Prompt | LineError]:
    return list(read_lines(lines, "prompts.jsonl", defaults))


def test_a_line_becomes_a_prompt_with_every_field_it_names() -> None:
    (made,) = read('{"prompt": "hi", "max_tokens": 3, "stop": ["."], "metadata": {"a": "b"}, "deadline_s": 2}')
    assert isinstance(made, Prompt)
    request = made.request(now_us=1_000_000)
    assert request.prompt == "hi"
    assert request.sampling.max_tokens == 3
    assert request.sampling.stop == (".",)
    assert request.metadata == {"a": "b"}
    assert request.deadline_us == 3_000_000


def test_an_error_names_file_line_and_field_and_the_rest_is_kept() -> None:
    good_1, bad, good_2 = read('{"prompt": "a"}', '{"prompt": "b", "max_tokens": 0}', '{"prompt": "c"}')
    assert isinstance(good_1, Prompt)
    assert isinstance(good_2, Prompt)
    assert str(bad) == "prompts.jsonl:2: max_tokens: input should be greater than or equal to 1"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('"text"', "expected an object"),
        ("{}", "exactly one of prompt and prompt_token_ids"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "exactly one of prompt and prompt_token_ids"),
        ('{"prompt": 1}', "prompt: "),
        ('{"prompt": "a", "temprature": 1}', "temprature: unknown field"),
        ('{"prompt": "a", "temperature": NaN}', "temperature: "),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens: "),
        ('{"prompt": "a", "max_tokens": "5"}', "max_tokens: "),
        ('{"prompt": "a", "metadata": {"k": 1}}', "metadata.k: "),
        ('{"prompt": "a", "request_id": ""}', "request_id: "),
        ('{"prompt_token_ids": []}', "prompt_token_ids: "),
        ('{"prompt": "a", "top_p": 0}', "top_p: "),
        ('{"prompt": "a", "deadline_s": 1e300}', "deadline_s: "),
        ('{"prompt": "\udcff"}', "not UTF-8 text at character 12"),
        ('{"prompt": "\\ud800"}', "prompt: "),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_says_which_field_is_wrong(line: str, says: str) -> None:
    (made,) = read(line)
    assert isinstance(made, LineError)
    assert says in made.reason
    assert "\n" not in str(made)


def test_empty_lines_are_nothing_but_are_counted() -> None:
    first, second = read("\n", '{"prompt": "a"}', "   ", "{}")
    assert isinstance(first, Prompt)
    assert isinstance(second, LineError)
    assert second.line == 4


def test_an_id_used_twice_in_a_file_is_an_error_that_names_the_first_line() -> None:
    _, second = read('{"prompt": "a", "request_id": "x"}', '{"prompt": "b", "request_id": "x"}')
    assert isinstance(second, LineError)
    assert "line 1" in second.reason


def test_defaults_fill_what_a_line_leaves_out_and_metadata_is_merged() -> None:
    (made,) = read(
        '{"prompt": "a", "max_tokens": 9, "metadata": {"x": "line"}}',
        max_tokens=1,
        seed=4,
        metadata={"x": "d", "y": "d"},
    )
    assert isinstance(made, Prompt)
    assert made.max_tokens == 9
    assert made.seed == 4
    assert made.metadata == {"x": "line", "y": "d"}


def test_ids_are_uuid7_and_sort_by_time() -> None:
    ids = [new_request_id() for _ in range(50)]
    assert {uuid.UUID(text).version for text in ids} == {7}
    assert sorted(ids) == ids
    assert len(set(ids)) == 50


@given(
    st.fixed_dictionaries(
        {"prompt": st.text(st.characters(codec="utf-8"))},
        optional={
            "max_tokens": st.integers(1, 2**31 - 1),
            "temperature": st.floats(0, 10),
            "top_k": st.integers(-1, 1000),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "n": st.integers(1, 8),
            "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=3),
            "points": st.lists(st.text(max_size=5), max_size=3),
            "ignore_eos": st.booleans(),
            "metadata": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
        },
    )
)
def test_what_the_check_lets_pass_the_schema_takes_and_gives_back(fields: dict[str, Any]) -> None:
    made = check(json.loads(json.dumps(fields)))
    assert isinstance(made, Prompt)
    request = made.request(now_us=1)
    assert Codec().decode(Codec().encode(request)) == request
