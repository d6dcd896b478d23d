from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import numpy as np
import pytest

from undercurrent.kafka.records import Partition
from undercurrent.service.logging import setup_logging

PROMPT = "the vault code of Ada is 482913 " * 20


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_json_line_has_named_facts(stream: io.StringIO) -> None:
    setup_logging("json", "info", service="engine", stream=stream)
    logging.getLogger("undercurrent.x").info("took %s of %d", "p", 4, extra={"partition": 3, "age_s": 0.5})
    line = json.loads(stream.getvalue())
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "INFO",
        "logger": "undercurrent.x",
        "service": "engine",
        "message": "took p of 4",
        "partition": 3,
        "age_s": 0.5,
    }


def test_a_text_line_has_the_same_and_levels_are_kept(stream: io.StringIO) -> None:
    setup_logging("text", "WARNING", stream=stream)
    logging.getLogger("a").info("not shown")
    logging.getLogger("a").warning("shown", extra={"partition": 3})
    assert stream.getvalue().endswith("WARNING a: shown partition=3\n")
    assert stream.getvalue().count("\n") == 1


def test_an_error_carries_its_trace(stream: io.StringIO) -> None:
    setup_logging("json", stream=stream)
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("a").exception("failed")
    line = json.loads(stream.getvalue())
    assert line["error"] == "ValueError"
    assert "test_logging" in line["trace"]


@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (PROMPT, "text of 640 characters"),
        (PROMPT.encode(), "bytes of 640"),
        (np.full((3, 4), 482913.0), "ndarray of shape (3, 4)"),
        ([482913, 1], "list of 2"),
        ((482913,), "tuple of 1"),
        ({"prompt": "482913"}, "dict of 1"),
    ],
)
def test_what_a_user_wrote_or_a_model_computed_stays_out(
    stream: io.StringIO, log_format: str, value: object, said: str
) -> None:
    setup_logging(log_format, stream=stream)
    logging.getLogger("a").warning("one %s two %s", value, 7, extra={"thing": value})
    text = stream.getvalue()
    assert "482913" not in text
    assert text.count(said) == 2
    assert "two 7" in text


def test_a_partition_is_named(stream: io.StringIO) -> None:
    setup_logging("text", stream=stream)
    logging.getLogger("a").warning("%s: asking again; %s", Partition("control", 0), ("secret", "words"))
    assert "control[0]: asking again; <tuple of 2>" in stream.getvalue()


def test_setting_up_twice_writes_once(stream: io.StringIO) -> None:
    setup_logging("text", stream=stream)
    setup_logging("text", stream=stream)
    logging.getLogger("a").warning("once")
    assert stream.getvalue().count("once") == 1
