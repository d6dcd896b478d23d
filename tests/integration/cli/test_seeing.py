"""`status`, `explain`, `audit` and `dlq` on Apache Kafka, after something of everything has happened."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.integration.cli.seeing_world import TIMEOUT_S, SeeingWorld
from undercurrent.codec.avro import Codec
from undercurrent.kafka.records import Record
from undercurrent.testing.brokers import Broker
from undercurrent.topics import partition_of

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def world(apache_broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeeingWorld]:
    """A pipeline that is still running. The tests go from what changes nothing to what ends it."""
    made = SeeingWorld(apache_broker.settings(), tmp_path_factory.mktemp("seeing"))
    try:
        made.happen()
        yield made
    finally:
        made.close()


def test_the_record_keeps_every_promise(world: SeeingWorld) -> None:
    said = world.run("audit", "--patience", "0")
    assert said.startswith("Every promise is kept: 8 prompts, 6 requests over, 0 under way, 7 streams, 7 verdicts")
    (sums,) = world.lines("audit", "--since", "1h", "--patience", "0")
    assert (sums["findings"], sums["prompts"], sums["letters"]) == (0, 8, 4)


def test_a_request_that_a_probe_stopped_is_explained_from_prompt_to_final(world: SeeingWorld) -> None:
    request_id = world.ids["aborted"]
    (told,) = world.lines("explain", request_id)
    words = [entry["what"] for entry in told["timeline"]]
    assert (told["request_id"], told["outcome"], told["findings"]) == (request_id, "aborted", [])
    assert words[:2] == ["prompt", "accepted"]
    assert set(words) >= {"stream", "activations", "stream end", "signal", "verdict", "command", "ack", "final"}
    (final,) = (entry for entry in told["timeline"] if entry["what"] == "final")
    (command,) = (entry for entry in told["timeline"] if entry["what"] == "command")
    assert final["command_id"] == command["command_id"]
    assert {(curve["point"], curve["probe"]) for curve in told["scores"]} == {("residual", "quiet"), ("danger", "loud")}
    shown = world.run("explain", request_id)
    assert f"{request_id}: aborted, from " in shown
    assert "stopped by loud" in shown


def test_a_poisoned_prompt_is_explained_with_its_dead_letter(world: SeeingWorld) -> None:
    (told,) = world.lines("explain", "poison")
    assert told["outcome"] == "failed"
    assert {"unreadable", "dead letter", "final"} <= {entry["what"] for entry in told["timeline"]}
    assert "knows the request 'nobody'" in world.run("explain", "nobody", code=1)


def test_status_says_how_far_everything_is(world: SeeingWorld) -> None:
    def settled() -> dict[str, object] | None:
        done = world.start("status", "--json", "--window", "5")
        found = json.loads(done.stdout)
        quiet = not any(part["lag"] for group in found["engines"] + found["hosts"] for part in group["partitions"])
        return {**found, "code": done.returncode} if quiet and found["level"] == "healthy" else None

    found = world.bench.wait(settled, "a healthy pipeline", TIMEOUT_S)
    (engines,) = found["engines"]
    assert (found["code"], engines["members"], found["names"].keys()) == (0, 1, {"engine-0"})
    assert [part["epoch"] for part in engines["partitions"]] == [1, 1]
    assert {host["name"].removeprefix(world.bench.plan.prefix): host["members"] for host in found["hosts"]} == {
        ".probes.danger": 1,
        ".probes.residual": 1,
    }
    assert all(part["owner"] for group in found["engines"] + found["hosts"] for part in group["partitions"])
    assert found["letters"][f"{world.bench.plan.prefix}.prompts.dlq"]["all"] == 3
    shown = world.run("status", "--window", "5")
    assert "healthy" in shown.splitlines()[0]
    lately = json.loads(world.start("status", "--json", "--window", "3600").stdout)
    assert lately["level"] == "degraded", "dead letters"
    assert lately["finals"] == {"aborted": 1, "completed": 5, "failed": 2}


def test_dead_letters_are_listed_and_shown_as_they_came(world: SeeingWorld) -> None:
    rows = {row["cause"]: row for row in world.lines("dlq", "list")}
    assert rows.keys() == {"bad_request", "undecodable", "bad_key", "poison"}
    assert rows["poison"]["topic"] == world.bench.plan.activations("residual")
    assert rows["bad_key"]["service"] == "engine-0"
    assert rows["poison"]["service"].endswith(".probes.residual")
    only = world.lines("dlq", "list", "--topic", world.bench.plan.prompts, "--cause", "undecodable")
    assert [row["key"] for row in only] == ["poison"]
    saved = world.folder / "saved"
    shown = world.run("dlq", "show", rows["undecodable"]["letter"], "--save", str(saved))
    assert saved.read_bytes() == b"\x00not avro"
    assert "00 6e 6f 74" in shown
    assert world.start("dlq", "show", "nonsense").returncode == 2


def test_only_a_prompt_that_failed_goes_back_and_only_once(world: SeeingWorld) -> None:
    rows = {row["cause"]: row for row in world.lines("dlq", "list")}
    assert "would be dead-lettered again" in world.run("dlq", "requeue", rows["bad_key"]["letter"], code=1)
    assert "replay" in world.run("dlq", "requeue", rows["poison"]["letter"], code=1)
    row, before = rows["undecodable"], _prompts(world)
    assert "workers answer it as a repeat until" in " ".join(world.run("dlq", "show", row["letter"]).split())
    assert "would write" in world.run("dlq", "requeue", row["letter"], "--dry-run")
    assert _prompts(world) == before
    world.run("dlq", "requeue", row["letter"])
    (back,) = (record for record in _prompts(world) if record not in before)
    original = next(r for r in before if (r.partition, r.offset) == (row["partition"], row["offset"]))
    assert (back.key, back.value, back.partition) == (original.key, original.value, original.partition)
    assert dict(back.headers)["undercurrent.requeued_from"] == row["letter"].encode()
    assert "was requeued" in world.run("dlq", "requeue", row["letter"], code=1)
    (marked,) = (item for item in world.lines("dlq", "list") if item["letter"] == row["letter"])
    assert marked["requeued_to"] == {"partition": back.partition, "offset": back.offset}
    assert len(world.lines("dlq", "list")) == 4, "what is noted of a requeue is no letter"


def test_a_prompt_that_can_be_read_runs_again_under_its_next_id(world: SeeingWorld) -> None:
    (row,) = world.lines("dlq", "list", "--cause", "bad_request")
    world.run("dlq", "requeue", row["letter"])
    codec, again = Codec(), f"{row['key']}~2"
    (back,) = (record for record in _prompts(world) if record.key == again.encode())
    assert back.partition == partition_of(again, 2)
    message = codec.decode(back.value)
    assert (message.request_id, message.metadata["requeued_from"]) == (again, row["key"])
    letters = world.bench.wait(lambda: _letters_of(world, again), "it to be refused under its new id too", TIMEOUT_S)
    assert [letter["cause"] for letter in letters] == ["bad_request"]


def test_a_verdict_too_many_is_found(world: SeeingWorld) -> None:
    world.unwanted_verdict()
    said = world.run("audit", "--patience", "0", code=1)
    assert "double_verdict" in said
    assert world.ids["completed"] in said
    finding, *_ = world.lines("audit", "--patience", "0", code=1)
    assert (finding["kind"], finding["request_id"]) == ("double_verdict", world.ids["completed"])


def test_status_says_who_is_gone(world: SeeingWorld) -> None:
    assert world.worker.terminate() == 0
    assert world.host.terminate() == 0

    def down() -> str | None:
        done = world.start("status")
        return done.stdout if done.returncode == 2 else None

    shown = world.bench.wait(down, "a pipeline that is down", TIMEOUT_S)
    assert "no engine worker is in the group" in shown


def _letters_of(world: SeeingWorld, key: str) -> list[dict[str, object]]:
    return [row for row in world.lines("dlq", "list") if row["key"] == key]


def _prompts(world: SeeingWorld) -> list[Record]:
    return world.bench.read(world.bench.plan.prompts)
