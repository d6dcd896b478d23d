"""`vllm serve ... --middleware engine_worker.middleware.ControlMiddleware`: aborts in a bare vLLM server.

vLLM makes one in every API-server process. It passes each request on as it is; all that it does happens when the server
starts and ends. A server whose control cannot be read does not start.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from engine_worker.server_control import ServerControl
from engine_worker.server_lengths import ServerLengths
from undercurrent.adapters.vllm.server_settings import ServerConfig, server_config
from undercurrent.adapters.vllm.settings import CONFIG_KEY
from undercurrent.errors import ConfigError, ProbingError

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class ControlMiddleware:
    """An ASGI application around another one.

    Args:
        app: the other one.
        follow: begins to follow an engine client's requests; vLLM gives the other argument alone.
    """

    def __init__(self, app: Application, follow: Callable[[Any], Awaitable[ServerControl]] | None = None) -> None:
        self._app = app
        self._follow = follow or _follow
        self._control: ServerControl | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                message = await self._begin(scope, message)
            elif message["type"].startswith("lifespan.shutdown."):
                await self._end()
            await send(message)

        await self._app(scope, receive, told)

    async def _begin(self, scope: Message, complete: Message) -> Message:
        """Start control; return what the server is told of its start."""
        try:
            self._control = await self._follow(scope["app"].state.engine_client)
        # An exception here would not stop the server, which would then serve without control; these words do.
        except Exception as exc:
            reason = str(exc) if isinstance(exc, ProbingError) else f"{type(exc).__name__}: {exc}"
            logger.error("control cannot be read, so this server does not start: %s", reason)
            return {"type": "lifespan.startup.failed", "message": reason}
        return complete

    async def _end(self) -> None:
        if self._control is not None:
            await self._control.stop()


async def _follow(llm: Any) -> ServerControl:  # noqa: ANN401 - an AsyncLLM
    # Here, so that the module can be imported, and its mistakes told, without vLLM.
    from undercurrent.adapters.vllm.compat import server as compat

    config = config_of(compat.additional_config_of(llm), plugin_is_loaded=compat.plugin_is_loaded())
    speak(config.own.logging.level)
    index, count = compat.server_index_of(llm), compat.api_servers_of(llm)
    lengths = None
    if config.own.capture.confirm_lengths:
        lengths = ServerLengths.of(await compat.length_tables(llm), index=index, count=count)
    control = ServerControl(config, index, compat.ServedRequests(llm), lengths)
    try:
        await control.start()
    except BaseException:
        await control.stop()
        raise
    compat.follow_requests(llm, control)
    return control


def speak(level: str) -> None:
    """Let our own loggers say what they have to say, whatever the root logger is set to.

    Args:
        level: least level that is shown.
    """
    # A package that vLLM imports in its API servers sets the root logger to ERROR: no warning of ours would be seen.
    for package in ("engine_worker", "undercurrent"):
        logging.getLogger(package).setLevel(level)


def config_of(additional: object, *, plugin_is_loaded: bool) -> ServerConfig:
    """Return the file that a server's `--additional-config` names.

    Args:
        additional: vLLM's `additional_config`.
        plugin_is_loaded: vLLM loaded this package's plugin.

    Raises:
        ConfigError: what is missing, or wrong in the file, by its key.
        SpecError: the points cannot be read, or a bare server cannot honour them.
    """
    if not plugin_is_loaded:
        raise ConfigError("vLLM did not load the plugin `undercurrent`, so nothing is captured: look at VLLM_PLUGINS")
    ours = additional.get(CONFIG_KEY) if isinstance(additional, Mapping) else None
    if not isinstance(ours, Mapping) or not isinstance(ours.get("settings"), str):
        raise ConfigError(f"--additional-config has no {CONFIG_KEY}.settings, the path of the capture file")
    return server_config(Path(ours["settings"]))
