"""Rows of labels, and spans of text as spans of tokens."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from undercurrent.codec import Codec
from undercurrent.errors import ConfigError, DatasetError, ProtocolError
from undercurrent.evaluation.labels import joined, key_of, parse_span, read_labels
from undercurrent.evaluation.spans import Generated, SpanMapper, TokenSpan, load_tokenizer, token_offsets
from undercurrent.protocol.labels import label_key_parts
from undercurrent.protocol.messages import LabelValue

NOW = datetime(2026, 1, 2, tzinfo=UTC)
ROW = {"request_id": "r|1", "name": "bad", "value": "positive", "source": "ann"}


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, some words as one token, and a mark that says nothing."""
    words = ["Ġthe", "Ġcat", "hello"]
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    made = Tokenizer(models.BPE(vocab={symbol: at for at, symbol in enumerate(symbols)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


def ids(tokenizer, *symbols):
    return tuple(tokenizer.token_to_id(symbol) for symbol in symbols)


def test_files_of_every_kind_say_the_same(tmp_path):
    rows = [ROW | {"token_start": 3, "token_end": 5}, ROW | {"request_id": "r2", "sampling_probability": 0.25}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    names = [*ROW, "token_start", "token_end", "sampling_probability"]
    lines = [",".join(str(row.get(name, "")) for name in names) for row in rows]
    (tmp_path / "a.csv").write_text("\n".join([",".join(names), *lines]))
    pq.write_table(
        pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), tmp_path / "a.parquet"
    )
    read = [list(read_labels(tmp_path / f"a.{kind}")) for kind in ("jsonl", "csv", "parquet")]
    assert read[0] == read[1] == read[2]
    first, second = (row.label(NOW) for row in read[0])
    assert (first.token_start, first.token_end, first.value) == (3, 5, LabelValue.POSITIVE)
    assert (second.token_start, second.sampling_probability) == (None, 0.25)
    assert first.created_at_us == NOW.timestamp() * 1e6
    assert Codec().decode(Codec().encode(first)) == first


def test_fields_that_rows_leave_out_are_filled_and_those_they_have_are_not(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"request_id": "a", "value": "negative", "source": "bob"}')
    [row] = read_labels(tmp_path / "a.jsonl", {"name": "bad", "source": "ann", "version": None})
    assert (row.name, row.source, row.version) == ("bad", "bob", "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"value": "yes"}, r"a.jsonl: record 2: field 'value': .*'positive'"),
        ({"name": "a|b"}, r"record 2: field 'name'"),
        ({"source": ""}, r"record 2: field 'source': Field required"),
        ({"token_start": 3}, "token_start 3, token_end None: expected both"),
        ({"token_start": 3, "token_end": 3}, "the first below the second"),
        ({"char_start": 4, "char_end": 2}, "char_start 4, char_end 2"),
        ({"char_start": 1, "char_end": 2, "token_start": 1, "token_end": 2}, "expected one of the two spans"),
        ({"sampling_probability": 0}, "field 'sampling_probability': Input should be greater than 0"),
        ({"token_start": 3, "token_end": 2**31}, "field 'token_end': Input should be less"),
        ({"request_id": "x" * 2_000_000}, "field 'request_id': String should have at most"),
        (
            {"created_at": "0001-01-01T00:00:00+14:00"},
            "created_at 0001-01-01T00:00:00.14:00: expected a year from 1970",
        ),
        ({"created_at": "2026-01-01T00:00:00"}, "field 'created_at': .*timezone"),
        ({"label": 1}, "field 'label': Extra inputs"),
        ({"request_id": "first"}, "are those of record 1, and only one judgement of a source counts"),
    ],
)
def test_a_wrong_row_is_named_with_its_field(tmp_path, change, said):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps(row) for row in (ROW | {"request_id": "first"}, ROW | change))
    )
    with pytest.raises(DatasetError, match=said):
        list(read_labels(tmp_path / "a.jsonl"))


def test_files_that_are_no_rows_are_refused(tmp_path):
    for name, text, said in (
        ("a.txt", "", "ends in .jsonl, .csv, .parquet"),
        ("a.jsonl", "{", "cannot be read"),
        ("b.jsonl", "[1]", "record 1: expected an object"),
        ("a.csv", "request_id,name\na,b,c", "record 1: has more cells than the header"),
        ("a.parquet", "no", "cannot be read"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DatasetError, match=said):
            list(read_labels(tmp_path / name))


def test_rows_that_differ_in_their_span_alone_are_one_label(tmp_path):
    spans = [(9, 12), (3, 5), (11, 14), (5, 6)]
    rows = [ROW | {"token_start": start, "token_end": end} for start, end in spans]
    other = ROW | {"source": "bob"}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*rows, other])))
    one, two = joined(row.label(NOW) for row in read_labels(tmp_path / "a.jsonl"))
    assert (one.source, one.spans, two.source, two.spans) == ("ann", ((3, 6), (9, 14)), "bob", ())
    assert Codec().decode(Codec().encode(one)) == one


@pytest.mark.parametrize(
    "second",
    [
        ROW,
        ROW | {"token_start": 7, "token_end": 8, "value": "negative"},
        ROW | {"char_start": 0, "char_end": 1, "version": "2"},
    ],
)
def test_a_source_judges_a_request_once_whatever_its_spans(tmp_path, second):
    first = ROW | {"token_start": 3, "token_end": 5}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [first, second])))
    with pytest.raises(DatasetError, match=r"record 2: .* are those of record 1, .* differ in nothing but their span"):
        list(read_labels(tmp_path / "a.jsonl"))


def test_a_key_is_taken_apart_again(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW))
    [row] = read_labels(tmp_path / "a.jsonl")
    assert key_of(row) == b"r|1|bad|ann"
    assert label_key_parts(key_of(row)) == ("r|1", "bad", "ann")
    with pytest.raises(ProtocolError, match="no label's"):
        label_key_parts(b"r1")


def test_options_name_spans():
    assert parse_span("12:30", "token") == {"token_start": 12, "token_end": 30}
    assert parse_span(None, "char") == {}
    with pytest.raises(ConfigError, match="--chars '12-30': expected START:END"):
        parse_span("12-30", "char")


def test_each_token_has_the_characters_that_it_made(tokenizer):
    text, offsets = token_offsets(tokenizer, ids(tokenizer, "hello", "Ġthe", "Ã", "©", "Ġcat", "<end>"))
    assert text == "hello theé cat"
    assert offsets == [(0, 5), (5, 9), (9, 10), (9, 10), (10, 14), (14, 14)]


def test_spans_of_text_become_spans_of_tokens(tokenizer):
    tokens = ids(tokenizer, "hello", "Ġthe", "Ã", "©", "Ġcat", "<end>")
    mapper = SpanMapper(tokenizer, Generated(prompt_tokens=10, token_ids=tokens, text="hello theé c"))
    assert mapper.tokens(0, 5) == TokenSpan(10, 11, True)
    assert mapper.tokens(5, 10) == TokenSpan(11, 14, True)
    assert mapper.tokens(9, 10) == TokenSpan(12, 14, True)
    assert mapper.tokens(6, 9) == TokenSpan(11, 12, False)
    assert mapper.tokens(1, 12) == TokenSpan(10, 15, False)
    assert mapper.tokens(3, 13) == "ends at character 13; the generated text has 12"


def test_a_text_of_another_tokenizer_does_not_align(tokenizer):
    mapper = SpanMapper(tokenizer, Generated(prompt_tokens=1, token_ids=ids(tokenizer, "hello"), text="goodbye"))
    assert "is it that of the model?" in mapper.tokens(0, 3)


def test_a_tokenizer_is_read_from_its_file_or_folder(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(path).token_to_id("Ġcat") == tokenizer.token_to_id("Ġcat")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DatasetError, match="no tokenizer that can be read"):
        load_tokenizer(tmp_path)
