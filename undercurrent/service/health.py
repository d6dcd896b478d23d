"""A small HTTP server that tells how a service is: /metrics, /healthz, /readyz.

`/healthz` fails only when a loop is stuck, that is when its heartbeat is too old: a restart would help. `/readyz` fails
while the service should get no work, and says why: a restart would not help. Both answer JSON.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from undercurrent.errors import ConfigError


class Heartbeat:
    """The sign of life of one loop.

    Args:
        name: the loop's.
        limit_s: without a beat for so long the loop counts as stuck.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.limit_s = limit_s
        self._clock = clock
        self._last_s: float | None = None

    def beat(self) -> None:
        """Show life; called by the loop every time round."""
        self._last_s = self._clock()

    def rest(self) -> None:
        """Stop expecting beats: the loop has ended in good order, or has not begun."""
        self._last_s = None

    @property
    def last_s(self) -> float | None:
        """When it beat last, by its clock; None while no beat is expected."""
        return self._last_s

    @property
    def age_s(self) -> float:
        """Seconds since the last beat; 0 while none is expected."""
        return 0.0 if self._last_s is None else self._clock() - self._last_s

    @property
    def stuck(self) -> bool:
        """Whether the last beat is too old."""
        return self.age_s > self.limit_s


class HealthServer:
    """Serves metrics and health on a thread of its own.

    Args:
        registry: the service's metrics.
        heartbeats: of its loops.
        not_ready: asked on each request; reasons why the service should get no work, none when it is ready.
        host: the interface; loopback unless the deployment says otherwise.
        port: 0 for any free one.

    Raises:
        ConfigError: the interface or the port cannot be had.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        heartbeats: Iterable[Heartbeat] = (),
        not_ready: Callable[[], Iterable[str]] = tuple,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._registry = registry
        self._heartbeats = list(heartbeats)
        self._not_ready = not_ready
        try:
            self._server = ThreadingHTTPServer((host, port), self._handler())
        except OSError as exc:
            why = f"{host}:{port} cannot be served: {exc.strerror or exc}"
            raise ConfigError(f"metrics: {why}; set metrics.port to another, 0 for any free one") from exc
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering; harmless when it never began."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(5.0)
        self._server.server_close()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status, content type and body for a path."""
        match path.partition("?")[0]:
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry)
            case "/healthz":
                stuck = [
                    f"{beat.name}: no sign of life for {beat.age_s:.1f} s" for beat in self._heartbeats if beat.stuck
                ]
                return _json("stuck", stuck)
            case "/readyz":
                return _json("not ready", list(self._not_ready()))
            case _:
                return HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"/metrics /healthz /readyz\n"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, content_type, body = answer(self.path)
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: scrapes come every few seconds."""

        return Handler


def _json(bad: str, reasons: list[str]) -> tuple[int, str, bytes]:
    status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
    body = json.dumps({"status": bad if reasons else "ok", "reasons": reasons}) + "\n"
    return status, "application/json", body.encode()
