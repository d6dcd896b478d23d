"""A real Apache Kafka that lets nobody in without proof, and checks what each may do.

    with secured_kafka(folder, users=("probes", "producer")) as kafka:
        settings = kafka.scram("probes")             # or .mutual_tls("probes"), .oauth("probes")
        kafka.grant("probes", rights(plan, Service.PROBES))

Certificates come from an authority of the test's own, tokens from an issuer of the test's own; the broker verifies them
with Kafka's own validators. Needs the `dev` extra and an Apache Kafka with Java (KAFKA_HOME).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from undercurrent.acls import Right
from undercurrent.kafka.acl_admin import grant
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.testing.brokers import Broker, apache_kafka, find_kafka_home
from undercurrent.testing.servers import free_port
from undercurrent.testing.tokens import AUDIENCE, ISSUER, TokenServer

if TYPE_CHECKING:
    import trustme

_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
_BEARER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;"
_VALIDATOR = "org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler"
_PROTOCOLS = {
    "CONTROLLER": "PLAINTEXT",
    "INTERNAL": "PLAINTEXT",
    "TLS": "SSL",
    "MUTUAL": "SSL",
    "SCRAM": "SASL_SSL",
    "OAUTH": "SASL_SSL",
}


@dataclass(slots=True)
class SecuredKafka:
    """The broker, and the ways in.

    Args:
        broker: its plain listener is the administrator's.
        folder: holds certificates and passwords.
        ports: of each listener.
        passwords: of each user.
        tokens: issues tokens.
        authority: signs certificates.
    """

    broker: Broker
    folder: Path
    ports: dict[str, int]
    passwords: dict[str, str]
    tokens: TokenServer
    authority: trustme.CA
    _certificates: dict[str, tuple[Path, Path]] = field(default_factory=dict)

    @property
    def admin(self) -> KafkaSettings:
        """The connection of the administrator, who may do everything."""
        return self.broker.settings()

    def tls(self) -> KafkaSettings:
        """Return a connection that knows the broker by its certificate and shows none."""
        return self._connection("TLS", {"security.protocol": "ssl"})

    def mutual_tls(self, user: str) -> KafkaSettings:
        """Return a connection of a user with a certificate."""
        certificate, key = self.certificate(user)
        options = {
            "security.protocol": "ssl",
            "ssl.certificate.location": str(certificate),
            "ssl.key.location": str(key),
        }
        return self._connection("MUTUAL", options)

    def scram(self, user: str) -> KafkaSettings:
        """Return a connection of a user with a password."""
        return self._connection("SCRAM", self.scram_options(user))

    def scram_options(self, user: str, password: str | None = None) -> dict[str, str]:
        """Return librdkafka's keys for a user with a password, theirs by default."""
        return {
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": self.passwords[user] if password is None else password,
        }

    def oauth(self, user: str, secret: str | None = None) -> KafkaSettings:
        """Return a connection of a user who gets a token from the issuer for a client secret, theirs by default."""
        options = {
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": user,
            "sasl.oauthbearer.client.secret": self.passwords[user] if secret is None else secret,
            "sasl.oauthbearer.token.endpoint.url": self.tokens.url,
        }
        return self._connection("OAUTH", options)

    def certificate(self, user: str) -> tuple[Path, Path]:
        """Return the files of a user's certificate and its key."""
        if user not in self._certificates:
            leaf = self.authority.issue_cert(f"{user}@undercurrent.invalid", common_name=user)
            certificate, key = self.folder / f"{user}.crt", self.folder / f"{user}.key"
            leaf.cert_chain_pems[0].write_to_path(certificate)
            leaf.private_key_pem.write_to_path(key)
            self._certificates[user] = certificate, key
        return self._certificates[user]

    def grant(self, user: str, granted: Iterable[Right]) -> None:
        """Let a user do some things."""
        grant(self.admin, f"User:{user}", granted)

    def _connection(self, listener: str, options: dict[str, str]) -> KafkaSettings:
        where = {
            "bootstrap_servers": f"localhost:{self.ports[listener]}",
            "ssl.ca.location": str(self.folder / "ca.crt"),
        }
        return KafkaSettings.model_validate({**where, **options})


@contextmanager
def secured_kafka(folder: Path, users: Sequence[str]) -> Iterator[SecuredKafka]:
    """Run one for the block's time.

    Args:
        folder: gets certificates and keys.
        users: who there are; each gets a password.

    Raises:
        BrokerUnavailableError: no Apache Kafka with Java is here.
    """
    import trustme

    find_kafka_home()  # a container could not see the files
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    _write_server(authority, folder / "server.pem")
    ports = {listener: free_port() for listener in _PROTOCOLS}
    passwords = {user: secrets.token_urlsafe(16) for user in users}
    keys = folder / "jwks.json"
    with TokenServer(passwords) as tokens:
        keys.write_text(json.dumps(tokens.key_set()), encoding="utf-8")
        options = [part for user in users for part in ("--add-scram", _scram(user, passwords[user]))]
        with apache_kafka(
            properties=_properties(folder, ports, keys),
            port=ports["INTERNAL"],
            heap="-Xms64m -Xmx512m",
            format_options=options,
            java_options=f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={keys.as_uri()}",
        ) as broker:
            yield SecuredKafka(broker, folder, ports, passwords, tokens, authority)


def _scram(user: str, password: str) -> str:
    return f"SCRAM-SHA-512=[name={user},password={password}]"


def _write_server(authority: trustme.CA, path: Path) -> None:
    """Write key and certificate as Kafka reads them: PKCS#8, the key first."""
    from cryptography.hazmat.primitives import serialization

    leaf = authority.issue_cert("localhost", "127.0.0.1")
    key = serialization.load_pem_private_key(leaf.private_key_pem.bytes(), None)
    pkcs8 = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(pkcs8 + b"".join(pem.bytes() for pem in leaf.cert_chain_pems))


def _properties(folder: Path, ports: dict[str, int], keys: Path) -> dict[str, str]:
    listeners = ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())
    outside = [name for name in ports if name != "CONTROLLER"]
    hosts = {"INTERNAL": "127.0.0.1"}
    bearer = "listener.name.oauth.oauthbearer.sasl"
    return {
        "controller.quorum.voters": f"1@127.0.0.1:{ports['CONTROLLER']}",
        "listeners": listeners,
        "advertised.listeners": ",".join(f"{name}://{hosts.get(name, 'localhost')}:{ports[name]}" for name in outside),
        "inter.broker.listener.name": "INTERNAL",
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in _PROTOCOLS.items()),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / "server.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(folder / "ca.crt"),
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.mutual.ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/,DEFAULT",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
        "listener.name.scram.sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.scram.scram-sha-512.sasl.jaas.config": _SCRAM,
        "listener.name.oauth.sasl.enabled.mechanisms": "OAUTHBEARER",
        f"{bearer}.jaas.config": _BEARER,
        f"{bearer}.server.callback.handler.class": _VALIDATOR,
        f"{bearer}.oauthbearer.jwks.endpoint.url": keys.as_uri(),
        f"{bearer}.oauthbearer.expected.audience": AUDIENCE,
        f"{bearer}.oauthbearer.expected.issuer": ISSUER,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
