"""A server whose control cannot be read does not start, and says what is wrong; one that can passes everything on."""

from __future__ import annotations

import asyncio
import logging
import traceback
from types import SimpleNamespace

import pytest
import yaml

from engine_worker.middleware import ControlMiddleware, config_of, speak
from engine_worker.server_control import ServerControl
from undercurrent.errors import ConfigError, SpecError, UnreachableError
from undercurrent.testing.servers import free_port

POINT = {
    "name": "p", "layers": [1], "tensor_type": "residual_stream", "position": "*", "execution_mode": "async",
    "queue_depth": 64,
}  # fmt: skip
SECRET = "canary-3b9f"


class Application:
    """Starts and ends when it is told, and notes what else comes."""

    def __init__(self):
        self.calls = []

    async def __call__(self, scope, receive, send):
        self.calls.append(scope["type"])
        if scope["type"] != "lifespan":
            await send({"type": "answer", "of": scope["path"]})
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})


class Control:
    """Notes that it was stopped."""

    stopped = False

    async def stop(self):
        self.stopped = True


def lifespan(middleware):
    """Run a server from its start to its end; return what it was told."""
    scope = {"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(engine_client="the client"))}
    told = []

    async def receive():
        return {"type": "lifespan.startup"}

    async def send(message):
        told.append(message)

    asyncio.run(middleware(scope, receive, send))
    return told


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.delenv("UNDERCURRENT_BOOTSTRAP_SERVERS", raising=False)

    def wrote(point=None, **sections):
        spec = {"version": 1, "extraction_points": [{**POINT, **(point or {})}]}
        (tmp_path / "points.yaml").write_text(yaml.safe_dump(spec))
        path = tmp_path / "capture.yaml"
        (tmp_path / "key-password").write_text(SECRET)
        kafka = {"bootstrap_servers": f"127.0.0.1:{free_port()}", "ssl.key.password_file": "key-password"}
        path.write_text(yaml.safe_dump({"kafka": kafka, "points": "points.yaml", **sections}))
        return path

    return wrote


def everything_of(error):
    """Return what a log shows of an error that nobody catches: its causes too, as vLLM's engine does."""
    return "\n".join(part for part in traceback.format_exception(error) if "test_middleware.py" not in part)


def given(path):
    return {"undercurrent": {"settings": str(path)}}


@pytest.mark.parametrize(
    "additional", [None, {}, {"undercurrent": None}, {"undercurrent": {}}, {"undercurrent": {"settings": None}}, "x"]
)
def test_a_server_that_names_no_file_is_told_which_argument_is_missing(additional):
    with pytest.raises(ConfigError, match=r"--additional-config has no undercurrent\.settings"):
        config_of(additional, plugin_is_loaded=True)


def test_a_server_without_the_plugin_is_told_where_to_look(write):
    with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
        config_of(given(write()), plugin_is_loaded=False)


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"kafka": {"ssl.key.password_file": "key-password"}}, r"kafka\.bootstrap_servers"),
        ({"kafka": {"bootstrap_servers": "b:1", "ssl.key.password": SECRET}}, r"ssl\.key\.password_file"),
        ({"kafka": {"bootstrap_servers": "b:1", "sasl.pasword": SECRET}}, r"sasl\.pasword"),
        ({"kafka": {"bootstrap_servers": "b:1", "sasl.password": [SECRET]}}, r"sasl\.password"),
        ({"kafka": {"bootstrap_servers": "b:1", "security.protocol": SECRET}}, r"security\.protocol"),
        ({"kafka": {"bootstrap_servers": "b:1", "sasl.password_file": "/nowhere"}}, r"sasl\.password_file"),
        ({"kafka": SECRET}, "kafka"),
        ({"topics": {"activation_partitions": SECRET}}, r"topics\.activation_partitions"),
        ({"topics": {"activation_partitions": 0}}, "activation_partitions"),
        ({"capture": {"static": ["nowhere"]}}, r"capture\.static"),
        ({"capture": {"trust_client_ids": SECRET}}, r"capture\.trust_client_ids"),
        ({"capture": {"max_tap_mib": 0}}, r"capture\.max_tap_mib"),
        ({"capture": {"block_timeout_s": -1}}, r"capture\.block_timeout_s"),
        ({"engine": {"name": "a/b"}}, r"engine\.name"),
        ({"engine": {"nice": -1}}, r"engine\.nice"),
        ({"publisher": {"ring_mib": 0}}, r"publisher\.ring_mib"),
        ({"publisher": {"interval_ms": -1}}, r"publisher\.interval_ms"),
        ({"publisher": {"ready_s": 0}}, r"publisher\.ready_s"),
        ({"metrics": {"port": 70_000}}, r"metrics\.port"),
        ({"logging": {"level": "LOUD"}}, r"logging\.level"),
        ({"points": "nowhere.yaml"}, r"nowhere\.yaml"),
        ({"pionts": "points.yaml"}, "pionts"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_wrong_setting_is_told_by_its_key_and_never_by_a_secret(write, sections, match):
    path = write(**sections)
    with pytest.raises((ConfigError, SpecError), match=match) as error:
        config_of(given(path), plugin_is_loaded=True)
    assert SECRET not in everything_of(error.value)


def test_a_file_that_is_not_there_or_no_yaml_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        config_of(given(tmp_path / "gone.yaml"), plugin_is_loaded=True)
    broken = tmp_path / "broken.yaml"
    broken.write_text(f"kafka: [sasl.password: {SECRET}")
    with pytest.raises(ConfigError, match=r"broken\.yaml") as error:
        config_of(given(broken), plugin_is_loaded=True)
    assert SECRET not in everything_of(error.value)


def test_what_prevents_the_start_is_what_the_server_is_told(caplog):
    async def follow(llm):
        assert llm == "the client"
        raise ConfigError("engine.name: too long")

    told = lifespan(ControlMiddleware(Application(), follow))
    assert told[0] == {"type": "lifespan.startup.failed", "message": "engine.name: too long"}
    assert "does not start: engine.name: too long" in caplog.text


def test_an_error_of_no_kind_of_ours_stops_the_start_too():
    async def follow(llm):
        raise ZeroDivisionError("x")

    assert lifespan(ControlMiddleware(Application(), follow))[0]["message"] == "ZeroDivisionError: x"


def test_control_begins_with_the_server_and_ends_with_it():
    control = Control()

    async def follow(llm):
        return control

    told = lifespan(ControlMiddleware(Application(), follow))
    assert [message["type"] for message in told] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert control.stopped


def test_warnings_are_seen_where_somebody_has_set_the_root_logger_to_errors():
    loggers = [logging.getLogger(name) for name in ("", "engine_worker", "undercurrent")]
    before = [logger.level for logger in loggers]
    warned = [logging.getLogger(name) for name in ("engine_worker.braking", "undercurrent.kafka.client")]
    try:
        loggers[0].setLevel(logging.ERROR)
        assert not any(logger.isEnabledFor(logging.WARNING) for logger in warned)
        speak("WARNING")
        assert all(logger.isEnabledFor(logging.WARNING) for logger in warned)
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def test_requests_pass_untouched():
    app, sent = Application(), []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/v1/models"}
    asyncio.run(ControlMiddleware(app)(scope, None, send))
    assert (app.calls, sent) == (["http"], [{"type": "answer", "of": "/v1/models"}])


@pytest.mark.timeout(60)
def test_an_address_where_nobody_is_is_named_soon(write, caplog):
    config = config_of(given(write()), plugin_is_loaded=True)

    async def start():
        control = ServerControl(config, 0, SimpleNamespace(tokens_of=lambda _: None))
        try:
            await control.start()
        finally:
            await control.stop()

    with pytest.raises(UnreachableError, match=config.kafka.bootstrap_servers):
        asyncio.run(start())
    assert SECRET not in caplog.text
