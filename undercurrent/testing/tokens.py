"""An issuer of signed tokens, as an OAuth client-credentials endpoint is one: for tests of SASL OAUTHBEARER."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote_plus

ISSUER = "https://issuer.undercurrent.invalid"
AUDIENCE = "kafka"
LIFETIME_S = 300
_KEY_ID = "test-key"


class TokenServer:
    """Serves `POST /token` to clients that know their secret; signs with RS256.

    Args:
        secrets: of each client.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        # Imported here: what signs is needed by tests alone.
        from cryptography.hazmat.primitives.asymmetric import rsa

        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._secrets = dict(secrets)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.refused = 0
        """Requests with a wrong secret."""
        self.issued = 0
        """Tokens given out."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="token server", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Of the endpoint."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/token"

    def key_set(self) -> dict[str, Any]:
        """Return the JSON Web Key Set with which its tokens are verified."""
        from jwt.algorithms import RSAAlgorithm

        public = RSAAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        return {"keys": [{**public, "kid": _KEY_ID, "alg": "RS256", "use": "sig"}]}

    def token(self, subject: str, **claims: Any) -> str:  # noqa: ANN401 - any claim
        """Return a signed token.

        Args:
            subject: who it is for.
            **claims: instead of the usual ones.
        """
        import jwt

        now = int(time.time())
        usual = {"sub": subject, "iss": ISSUER, "aud": AUDIENCE, "iat": now, "exp": now + LIFETIME_S, "scope": "kafka"}
        return jwt.encode({**usual, **claims}, self._key, algorithm="RS256", headers={"kid": _KEY_ID})

    def answer(self, authorization: str) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return status and body for an `Authorization` header."""
        client, _, secret = base64.b64decode(authorization.removeprefix("Basic ")).decode().partition(":")
        client, secret = unquote_plus(client), unquote_plus(secret)
        if not secret or self._secrets.get(client) != secret:
            self.refused += 1
            return HTTPStatus.UNAUTHORIZED, {"error": "invalid_client"}
        self.issued += 1
        token = self.token(client)
        return HTTPStatus.OK, {"access_token": token, "token_type": "Bearer", "expires_in": LIFETIME_S}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        tokens = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, body = tokens.answer(self.headers.get("Authorization", ""))
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler
