"""What a probe host's file may say."""

from __future__ import annotations

import pytest
import yaml
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from probe_consumers.__main__ import build, read_config
from probe_consumers.bound import set_fingerprint
from probe_consumers.cli import app
from probe_consumers.joined_topics import check_joined
from probe_consumers.replay_cli import app as replay_app
from probe_consumers.replay_source import Loaded
from probe_consumers.rollout_command import version_of
from undercurrent.errors import ConfigError, TopicError
from undercurrent.kafka.client import Assignor
from undercurrent.probes import LinearProbe
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.joining_host import JoiningHost
from undercurrent.protocol.messages import BindingMode

POINT = {
    "name": "residual",
    "layers": [0],
    "tensor_type": "residual_stream",
    "position": "*",
    "execution_mode": "async",
    "queue_depth": 8,
}
GUARD = {"name": "guard", "point": "residual", "probe": "./guard", "mode": "abort"}


@pytest.fixture
def write(tmp_path):
    probe = LinearProbe.from_arrays([1.0, 2.0], 0.0, layer=0, tensor_type="residual_stream", threshold=1.0)
    probe.save(tmp_path / "guard")
    (tmp_path / "points.yaml").write_text(yaml.safe_dump({"version": 1, "extraction_points": [POINT]}))

    def write_file(name="host.yaml", **sections):
        base = {"kafka": {"bootstrap_servers": "nowhere:1"}, "points": "points.yaml", "bindings": [GUARD]}
        data = {key: value for key, value in {**base, **sections}.items() if value is not None}
        path = tmp_path / name
        path.write_text(yaml.safe_dump(data))
        return path

    return write_file


def test_a_short_file_is_enough(write):
    config = read_config(write())
    assert config.points == ("residual",)
    assert config.group("residual") == "undercurrent.probes.residual"
    assert config.plan.activations("residual") == "undercurrent.activations.residual"
    assert (config.host.start_from, config.host.transaction_interval_ms, config.host.service.slot) == (
        "earliest",
        100,
        None,
    )
    assert [bound.mode for bound in config.bounds] == ["abort"]


def test_every_key_is_read(write):
    config = read_config(
        write(
            **{
                "service": {"name": "safety", "slot": "3", "assignor": "consumer"},
                "topics": {"prefix": "t", "activation_partitions": 7},
                "from": "latest",
                "transaction_interval_ms": 50,
                "abort_max_age_s": 5,
                "metrics": {"host": "0.0.0.0", "port": 8080},  # noqa: S104
                "logging": {"format": "json", "level": "DEBUG"},
            }
        )
    )
    assert config.group("residual") == "t.safety.residual"
    assert (config.host.service.assignor, config.host.service.slot) == (Assignor.CONSUMER, "3")
    assert (config.plan.activation_partitions, config.plan.verdicts) == (7, "t.verdicts")
    assert (config.host.start_from, config.host.abort_max_age_s, config.host.metrics.port) == ("latest", 5.0, 8080)


def test_bindings_may_stand_in_a_file_of_their_own_with_paths_of_its_own(write, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (tmp_path / "guard").rename(folder / "guard")
    (folder / "probes.yaml").write_text(yaml.safe_dump({"bindings": [GUARD]}))
    config = read_config(write(bindings=None, probes="elsewhere/probes.yaml"))
    assert [bound.binding.name for bound in config.bounds] == ["guard"]
    other = read_config(write(bindings=None, probes="missing.yaml"), probes=folder / "probes.yaml")
    assert set_fingerprint(other.bounds) == set_fingerprint(config.bounds)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"points": None}, "points"),
        ({"bindings": None}, "bindings"),
        ({"probes": "probes.yaml"}, "one of the two"),
        ({"bindings": [{**GUARD, "point": "other"}]}, "other"),
        ({"bindings": [{**GUARD, "colour": "red"}]}, "colour"),
        ({"kafka": None}, "broker"),
        ({"kafka": {"bootstrap_servers": "x:1", "group.id": "mine"}}, "group.id"),
        ({"surprise": 1}, "surprise"),
        ({"service": {"name": "a b"}}, "service.name"),
        ({"service": {"assignor": "sticky"}}, "assignor"),
        ({"from": "now"}, "from"),
        ({"topics": {"colour": 1}}, "colour"),
        ({"transaction_interval_ms": 0}, "transaction_interval_ms"),
        ({"metrics": {"port": 99999}}, "metrics.port"),
    ],
)
def test_what_is_wrong_is_named(write, sections, named, monkeypatch):
    monkeypatch.delenv("UNDERCURRENT_BOOTSTRAP_SERVERS", raising=False)
    with pytest.raises(ConfigError, match=named):
        read_config(write(**sections))


JOINED = {"name": "both", "points": ["residual", "attn"], "probe": "./guard", "mode": "abort"}


@pytest.fixture
def write_joined(write, tmp_path):
    """The file of a host that joins two points, beside one that it reads alone."""

    def write_file(**sections):
        path = write(bindings=[GUARD, JOINED], **sections)
        points = [{**POINT, "name": name} for name in ("other", "residual", "attn")]
        (tmp_path / "points.yaml").write_text(yaml.safe_dump({"version": 1, "extraction_points": points}))
        return path

    return write_file


def test_a_host_may_join_points_beside_reading_them_alone(write_joined):
    config = read_config(write_joined())
    assert config.sources == {"residual": ("residual",), "residual+attn": ("residual", "attn")}
    assert (config.points, config.joined) == (("residual", "attn"), ("residual+attn",))
    assert config.group("residual+attn") == "undercurrent.probes.residual+attn"
    loops = build(config, CollectorRegistry())
    assert [(loop.point, type(loop.host._core)) for loop in loops] == [
        ("residual", ProbeHost), ("residual+attn", JoiningHost),
    ]  # fmt: skip
    assert loops[1].host.inputs.topics == ("undercurrent.activations.residual", "undercurrent.activations.attn")
    assert loops[1].versions.summaries()[0].point == "residual+attn"


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"service": {"assignor": "cooperative-sticky"}}, "need service.assignor: range .or the consumer protocol"),
        (
            {
                "service": {"assignor": "consumer"},
                "kafka": {"bootstrap_servers": "nowhere:1", "group.remote.assignor": "uniform"},
            },
            "kafka.options has group.remote.assignor: uniform",
        ),
    ],
)
def test_a_way_to_hand_out_partitions_that_tears_them_apart_is_refused(write_joined, sections, named):
    with pytest.raises(ConfigError, match=rf"binding 'both': field 'points': joining probes .*{named}"):
        read_config(write_joined(**sections))


def test_topics_with_unequal_counts_are_not_joined(write_joined):
    config = read_config(write_joined())
    residual, attn = (config.plan.activations(point) for point in ("residual", "attn"))
    check_joined(config, {residual: 4, attn: 4})
    check_joined(config, {residual: 4})  # what is missing is told by whoever looks for that
    with pytest.raises(TopicError, match=rf"'both': field 'points': {residual} has 4, {attn} has 3 partitions"):
        check_joined(config, {residual: 4, attn: 3})


def test_a_version_of_a_joining_probe_fits_what_its_rows_are_shown_as(write_joined, tmp_path):
    config = read_config(write_joined())
    version = version_of(config, config.bounds[1], tmp_path / "guard", BindingMode.SHADOW, 0.5)
    assert (version.artefact, version.share) == ("guard", 0.5)
    probe = LinearProbe.from_arrays([1.0, 2.0], 0.0, layer=1, tensor_type="residual_stream", threshold=1.0)
    probe.save(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"reads layer 1; point 'residual\+attn' has \[0\]"):
        version_of(config, config.bounds[1], tmp_path / "other", BindingMode.SHADOW, 0.5)


def test_a_replay_chooses_a_point_or_points_that_a_probe_joins(write_joined):
    config = read_config(write_joined())
    loaded = Loaded(config.bounds, config)
    with pytest.raises(ConfigError, match=r"--point: is missing; bindings read residual, residual\+attn"):
        _ = loaded.only_point
    for point, name in (("residual", "guard"), ("residual+attn", "both")):
        assert [bound.binding.name for bound in loaded.of_point(point)] == [name]
    assert Loaded(config.bounds[1:], config).only_point == "residual+attn"
    with pytest.raises(
        ConfigError, match=r"attn\+residual: no binding reads it; bindings read residual, residual\+attn"
    ):
        loaded.of_point("attn+residual")


def test_the_mode_of_a_binding_is_part_of_the_probe_sets_fingerprint(write):
    first = read_config(write())
    second = read_config(write(bindings=[{**GUARD, "mode": "shadow"}]))
    assert set_fingerprint(first.bounds) != set_fingerprint(second.bounds)
    assert set_fingerprint(first.bounds) == set_fingerprint(reversed(first.bounds))


@pytest.mark.parametrize(("command", "option"), [(app, "--config"), (replay_app, "--fail-on-diff")])
def test_help_is_there(command, option):
    result = CliRunner().invoke(command, ["run", "--help"] if command is app else ["--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert option in result.output
