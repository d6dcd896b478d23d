"""What `topics apply` would change, in words, before anything is."""

from __future__ import annotations

from undercurrent.cli.planning import groups_of
from undercurrent.cli.topic_changes import Changes, GroupDifference, summary
from undercurrent.kafka.admin import Difference, DifferenceKind
from undercurrent.subjects import Subject, SubjectDifference
from undercurrent.topics import TopicPlan

PLAN = TopicPlan()


def changed(key: str, planned: str, actual: str) -> str:
    (line,) = Changes(PLAN, [Difference("t", DifferenceKind.CONFIG, key, planned, actual)]).lines()
    return line


def test_each_change_is_one_line_with_a_mark():
    found = [
        Difference("a", DifferenceKind.MISSING, "", "1", ""),
        Difference("b", DifferenceKind.PARTITIONS, "", "4", "2"),
        Difference("c", DifferenceKind.CONFIG, "segment.ms", "5", ""),
    ]
    subjects = [
        SubjectDifference(Subject("a", "Label"), keys=("Label.1", "Label")),
        SubjectDifference(Subject("a", "X")),
    ]
    changes = Changes(PLAN, found, [*subjects, SubjectDifference(Subject("a", "Y"), level="NONE")])
    assert list(changes.lines()) == [
        "+ a: create with 1 partition",
        "! b: 2 partitions, planned 4",
        "~ c: segment.ms not set -> 5",
        "+ a-undercurrent.Label: register Label.1, Label",
        "~ a-undercurrent.X: compatibility not set -> FULL_TRANSITIVE",
        "~ a-undercurrent.Y: compatibility NONE -> FULL_TRANSITIVE",
    ]
    assert [item.topic for item in changes.refused] == ["b"]
    assert changes.of("c") == "~ segment.ms not set -> 5"
    assert changes.of("d") == ""


def test_what_a_change_takes_away_at_once_is_said():
    assert changed("retention.ms", "5", "9").endswith("(older records are deleted)")
    assert changed("retention.ms", "5", "-1").endswith("(older records are deleted)")
    assert changed("retention.ms", "9", "5") == "~ t: retention.ms 5 -> 9"
    assert changed("cleanup.policy", "compact", "delete").endswith("(of each key only the last record stays)")
    assert changed("cleanup.policy", "delete", "compact") == "~ t: cleanup.policy compact -> delete"


def test_the_summary_counts_topics_and_subjects():
    every = len(PLAN.topics())
    assert summary(Changes(PLAN, [])) == f"{every} of {every} topics were as planned"
    found = [Difference("t", DifferenceKind.CONFIG, key, "1", "2") for key in ("segment.ms", "retention.ms")]
    said = summary(Changes(PLAN, found, [SubjectDifference(Subject("a", "X"))]))
    assert said.startswith(f"{every - 1} of {every} topics were as planned; 1 created or mended; 1 subject of")


def test_a_session_timeout_is_set_for_each_group_of_the_pipeline():
    plan = TopicPlan(prefix="x", points=("p", "q"), session_timeout_ms=6000)
    assert groups_of({}, plan, None) == ["x.engine", "x.engine.letters", "x.probes.p", "x.probes.q"]
    named = {"group": {"name": "e"}, "service": {"name": "s"}}
    assert groups_of(named, plan, None) == ["x.e", "x.e.letters", "x.s.p", "x.s.q"]
    joined = {
        "bindings": [{"name": "j", "points": ["q", "p"], "probe": "x"}, {"name": "k", "point": "p", "probe": "x"}]
    }
    assert groups_of(joined, plan, None) == ["x.engine", "x.engine.letters", "x.probes.p", "x.probes.q", "x.probes.q+p"]
    changes = Changes(plan, [], [], [GroupDifference("x.engine", "consumer.session.timeout.ms", "6000", "45000")])
    assert list(changes.lines()) == ["~ group x.engine: consumer.session.timeout.ms 45000 -> 6000"]
    assert summary(changes).endswith("; 1 group")
