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
from undercurrent.adapters.vllm.server_settings import server_config
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
    """

    def __init__(self, app: Application) -> None:
        self._app = app
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
            self._control = await _follow(scope["app"].state.engine_client)
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

    if not compat.plugin_is_loaded():
        raise ConfigError("vLLM did not load the plugin `undercurrent`, so nothing is captured: look at VLLM_PLUGINS")
    additional = compat.additional_config_of(llm)
    ours = additional.get(CONFIG_KEY) if isinstance(additional, Mapping) else None
    if not isinstance(ours, Mapping) or "settings" not in ours:
        raise ConfigError(f"--additional-config has no {CONFIG_KEY}.settings, the path of the capture file")
    config = server_config(Path(str(ours["settings"])))
    control = ServerControl(config, compat.server_index_of(llm), compat.ServedRequests(llm))
    try:
        await control.start()
    except BaseException:
        await control.stop()
        raise
    compat.follow_requests(llm, control)
    return control
