"""The page on security says of each topic what its settings make true, and of each service what the table gives it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from undercurrent.acls import Operation, Resource, Service, rights
from undercurrent.retention import compacted_by_ms, deleted_by_ms
from undercurrent.topics import DLQ_SUFFIX, TopicPlan

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
PLAN = TopicPlan(points=("p",))


def rows(*first: str) -> dict[str, list[str]]:
    """Return the cells of the table whose header begins with some words, by the first cell."""
    lines = PAGE.splitlines()
    header = next(at for at, line in enumerate(lines) if line.startswith("| " + " | ".join(first)))
    found = {}
    for line in lines[header + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[0].split(" (")[0].strip("`")] = cells[1:]
    return found


def spoken(ms: int) -> str:
    minutes = ms // 60_000
    return f"{minutes // 60} h {minutes % 60} min"


TOPICS = rows("where", "what", "deleted after")


def row_of(topic: str) -> list[str]:
    if topic.endswith(DLQ_SUFFIX):
        return TOPICS["<topic>.dlq"]
    return TOPICS[re.sub(r"(?<=\.activations\.).*", "<point>", topic)]


@pytest.mark.parametrize("topic", PLAN.topics(), ids=lambda topic: topic.name)
def test_every_topic_has_its_row_with_the_time_that_its_settings_make(topic) -> None:
    _, after, gone = row_of(topic.name)
    if topic.compact:
        bound = compacted_by_ms(0, topic.config)
        assert bound is not None
        assert gone.startswith((spoken(bound), "never"))
        return
    bound = deleted_by_ms(0, topic.config)
    assert bound is not None
    assert gone == spoken(bound)
    assert after == f"{topic.retention_ms // 86_400_000} d"


def test_no_row_is_of_a_topic_that_is_not_there() -> None:
    known = {topic.name for topic in PLAN.topics()} | {"undercurrent.activations.<point>", "<topic>.dlq"}
    assert set(TOPICS) <= known


WORDS = {
    "prompts": PLAN.prompts,
    "generations": PLAN.generations,
    "activations": PLAN.activations("p"),
    "control": PLAN.control,
    "acks": PLAN.acks,
    "verdicts": PLAN.verdicts,
    "labels": PLAN.labels,
    "rollouts": PLAN.rollouts,
    "erasures": PLAN.erasures,
    "states": PLAN.probe_state,
    "dead letters of prompts": PLAN.dlq(PLAN.prompts),
    "dead letters of activations": PLAN.dlq(PLAN.activations("p")),
}

EACH = "dead letters of each topic that it reads"


@pytest.mark.parametrize("service", [s for s in Service if s is not Service.ADMIN])
def test_every_service_reads_and_writes_what_the_page_says(service: Service) -> None:
    reads, writes, _ = rows("service", "reads")[service.value]
    for cell, operation in ((reads, Operation.READ), (writes, Operation.WRITE)):
        table = {r.name for r in rights(PLAN, service) if r.resource is Resource.TOPIC and r.operation is operation}
        if cell == "everything":
            assert table == {topic.name for topic in PLAN.topics()}
            continue
        words = re.split(r", |; | and ", re.sub(r", to [a-z ]+", "", cell))
        named = {WORDS[word] for word in words if word and word != EACH}
        if EACH in words:
            named |= {PLAN.dlq(WORDS[word]) for word in reads.split(", ") if word != "erasures"}
        assert named == table
