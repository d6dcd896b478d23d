"""A schema registry with Confluent's API: what it is asked, what it answered, and what happens while it does not.

    kafka:
      bootstrap_servers: kafka:9092
      schema.registry.url: http://registry:8080/apis/ccompat/v7
      schema.registry.basic.auth.user.info_file: /run/secrets/registry     # user:password

Every other key behind `schema.registry.` is handed to Confluent's client as it is (`ssl.ca.location`, ...).

What it said once is remembered for the life of the process, so a registry that is down stops nobody who has seen the
schemas in use. An id that was never seen is asked for in the background by `ready`, which never waits: readers let the
record's partition stand meanwhile.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from undercurrent.errors import ConfigError, DecodeError, ProbingError, TopicError, UnreachableError

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

logger = logging.getLogger(__name__)

PREFIX = "schema.registry."
Scalar = str | int | float | bool

YOUNG_S = 10.0
"""So long after its append a record's id may be unknown to a registry that answers: its replicas learn of it late."""

_TIMEOUT_S = 5.0
_AGAIN_S = 0.5
_TOLD_INTERVAL_S = 10.0
# How long the answer that there is no such schema stands, and how many of them are remembered.
_REFUSED_S = 60.0
_MOST_REFUSED = 10_000
_NOT_FOUND = 404
_INCOMPATIBLE = 409


class RegistrySettings(BaseModel):
    """Where a schema registry is, and how it is asked.

    Args:
        url: of its Confluent API; several, separated by commas, are tried in turn.
        options: keys of Confluent's client, without the prefix.
        known: ids of this version's schemas by name, where a parent process has asked for its children.

    Raises:
        ConfigError: a key is unknown to the client, or its value is refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: str = Field(min_length=1)
    options: tuple[tuple[str, Scalar], ...] = ()
    known: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any]) -> Self:
        """Return the settings in the keys of a `kafka` section that begin with the prefix.

        Raises:
            ConfigError: see the class.
        """
        own = {key.removeprefix(PREFIX): value for key, value in keys.items()}
        known = own.pop("known", {})
        url = own.pop("url", None)
        if not isinstance(url, str) or not url:
            raise ConfigError(f"Kafka key '{PREFIX}url': expected the address of a schema registry")
        return cls(url=url, options=tuple(sorted(own.items())), known=tuple(sorted(known.items())))

    def keys(self) -> dict[str, Any]:
        """Return what `from_keys` takes, plain data."""
        named = {"url": self.url, **dict(self.options), **({"known": dict(self.known)} if self.known else {})}
        return {PREFIX + key: value for key, value in named.items()}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "@" in self.url:
            raise ConfigError(f"Kafka key '{PREFIX}url': credentials belong into {PREFIX}basic.auth.user.info")
        try:
            make_client(self).close()
        except (ValueError, TypeError, OSError) as exc:
            # The client's words name keys; a value that it would repeat is none of a secret's.
            raise ConfigError(f"Kafka keys {PREFIX}*: {exc}") from None
        return self


class Version(NamedTuple):
    """One version of a subject."""

    schema_id: int
    text: str


class Client(Protocol):
    """What is needed of Confluent's client."""

    def get_schema(self, schema_id: int) -> Any:  # noqa: ANN401 - the client library's own class
        """Return the schema with an id."""


def make_client(settings: RegistrySettings) -> SchemaRegistryClient:
    """Return Confluent's client, which has not connected; a question lasts a few seconds at most."""
    # Imported here: it brings an HTTP library along, and most deployments have no registry.
    from confluent_kafka.schema_registry import SchemaRegistryClient

    for library in ("httpx", "httpx2"):
        # They tell of every request; what fails reaches the log in our own words.
        logging.getLogger(library).setLevel(logging.WARNING)
    # By default the client waits for ever; trying again is our own business.
    return SchemaRegistryClient(
        {"timeout": _TIMEOUT_S, "max.retries": 0, **dict(settings.options), "url": settings.url}
    )


class Registry:
    """A schema registry, and what it has said. Usable from any thread.

    Args:
        settings: where it is.
        client: asks it; Confluent's by default.
        clock: seconds that grow.
        now_ms: milliseconds since the Unix epoch.
    """

    def __init__(
        self,
        settings: RegistrySettings,
        *,
        client: Client | None = None,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.settings = settings
        self._made_client: Any = client
        self._clock = clock
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._texts: dict[int, str] = {}
        self._refused: dict[int, tuple[str, float]] = {}
        # Per id that is asked for: until when a registry that answers may not know it.
        self._wanted: dict[int, float] = {}
        self._asker: threading.Thread | None = None
        self._told_s = -_TOLD_INTERVAL_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; what is known stays known, and another question opens it again."""
        client, self._made_client = self._made_client, None
        if client is not None:
            client.close()

    def learn(self, schema_id: int, text: str) -> None:
        """Note what the schema with an id is, as told by somebody else."""
        self._texts.setdefault(schema_id, text)

    def ready(self, schema_id: int, appended_ms: int) -> bool:
        """Return whether `text_of` answers at once, be it that there is no such schema; if not, ask in the background.

        Args:
            schema_id: the id.
            appended_ms: when the broker appended the record that has it, milliseconds since the Unix epoch; -1 where
                that is unknown.
        """
        if schema_id in self._texts:
            return True
        with self._lock:
            # It may have been answered since: under the lock whatever is known is no longer wanted.
            if schema_id in self._texts or self._refusal(schema_id) is not None:
                return True
            left_s = min(YOUNG_S, YOUNG_S - (self._now_ms() - appended_ms) / 1000) if appended_ms >= 0 else 0.0
            until_s = self._clock() + left_s
            self._wanted[schema_id] = min(until_s, self._wanted.get(schema_id, until_s))
            if self._asker is None:
                self._asker = threading.Thread(target=self._ask_on, name="schema registry", daemon=True)
                self._asker.start()
        return False

    def text_of(self, schema_id: int) -> str:
        """Return the schema with an id, asking for it where it was never seen.

        Raises:
            DecodeError: the registry has none.
            UnreachableError: it does not answer.
        """
        text = self._texts.get(schema_id)
        if text is not None:
            return text
        # Also one whose time is over by now: whoever asks was told by `ready` that nothing is to be waited for.
        refusal = self._refused.get(schema_id, (None, 0.0))[0]
        if refusal is None:
            refusal = self._ask(schema_id)
        if refusal is not None:
            raise DecodeError(refusal)
        return self._texts[schema_id]

    def versions(self, subject: str) -> Iterator[Version]:
        """Yield the versions of a subject, newest first; none where there is no such subject.

        Raises:
            UnreachableError: the registry does not answer.
        """
        numbers = self._call(lambda client: client.get_versions(subject), f"subject {subject}") or []
        for number in sorted(numbers, reverse=True):
            version = self._call(partial(_get_version, subject, number), f"subject {subject}")
            if version is not None:  # deleted in between
                self.learn(int(version.schema_id), str(version.schema.schema_str))
                yield Version(int(version.schema_id), str(version.schema.schema_str))

    def register(self, subject: str, text: str) -> int:
        """Register a schema under a subject and return its id; one that is there already stays as it is.

        Raises:
            TopicError: the registry refuses it, as incompatible with what is registered.
            UnreachableError: the registry does not answer.
        """
        from confluent_kafka.schema_registry import Schema

        what = f"subject {subject}"
        found = self._call(lambda client: client.register_schema(subject, Schema(text, "AVRO")), what)
        if found is None:
            raise TopicError(f"{what}: the registry at {self.settings.url} takes no schema")
        self.learn(int(found), text)
        return int(found)

    def compatibility(self, subject: str) -> str:
        """Return the compatibility level set for a subject; empty where none is.

        Raises:
            UnreachableError: the registry does not answer.
        """
        found = self._call(lambda client: client.get_compatibility(subject), f"compatibility of {subject}")
        return str(found or "")

    def set_compatibility(self, subject: str, level: str) -> None:
        """Set the compatibility level of a subject.

        Raises:
            UnreachableError: the registry does not answer.
            TopicError: it refuses.
        """
        self._call(lambda client: client.set_compatibility(subject, level), f"compatibility of {subject}")

    # Asking.

    def _refusal(self, schema_id: int) -> str | None:
        """Return why there is no such schema, where that was said lately; under the lock."""
        reason, until_s = self._refused.get(schema_id, ("", 0.0))
        if not reason or self._clock() < until_s:
            return reason or None
        del self._refused[schema_id]
        return None

    def _ask(self, schema_id: int) -> str | None:
        """Ask for a schema and keep it; return why there is none.

        Raises:
            UnreachableError: no answer.
        """
        found = self._call(lambda client: client.get_schema(schema_id), f"schema id {schema_id}")
        if found is None or not found.schema_str:
            return f"schema id {schema_id} is unknown to the registry at {self.settings.url}"
        self._texts[schema_id] = str(found.schema_str)
        return None

    def _refuse(self, schema_id: int, reason: str) -> None:
        if len(self._refused) >= _MOST_REFUSED:
            self._refused.clear()
        self._refused[schema_id] = reason, self._clock() + _REFUSED_S

    def _ask_on(self) -> None:
        """Ask for what is wanted, again and again, until nothing is."""
        while True:
            with self._lock:
                wanted = dict(self._wanted)
                if not wanted:
                    self._asker = None
                    return
            for schema_id, until_s in wanted.items():
                try:
                    refusal = self._ask(schema_id)
                except ProbingError as exc:  # whatever it is: without this thread every such record waits for ever
                    self._tell(f"{exc}; records of {len(wanted)} schemas wait")
                    with self._lock:
                        # Last from now on: an id that it cannot answer for must not keep it from the others.
                        self._wanted[schema_id] = self._wanted.pop(schema_id)
                    break
                with self._lock:
                    if refusal is None:
                        self._wanted.pop(schema_id, None)
                    elif self._clock() >= until_s:
                        self._wanted.pop(schema_id, None)
                        self._refuse(schema_id, refusal)
            else:
                if not self._wanted:
                    continue
            time.sleep(_AGAIN_S)

    def _tell(self, text: str) -> None:
        if self._clock() - self._told_s >= _TOLD_INTERVAL_S:
            self._told_s = self._clock()
            logger.warning("%s", text)

    def _call(self, question: Callable[[Any], Any], what: str) -> Any:  # noqa: ANN401 - the client library's answers
        """Return an answer; None where the registry says that there is no such thing."""
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            return question(self._client())
        except SchemaRegistryError as exc:
            if exc.http_status_code == _NOT_FOUND and exc.error_code // 100 == _NOT_FOUND:
                return None  # 40401 and the like name what is missing; a plain 404 is some other server, or path
            said = f"{exc.error_message} (status {exc.http_status_code})"
            if exc.http_status_code == _INCOMPATIBLE or exc.http_status_code == 422:
                raise TopicError(f"{what}: the schema registry refuses: {said}") from exc
            raise UnreachableError(f"{what}: the schema registry at {self.settings.url} says {said}") from exc
        except Exception as exc:  # the client library lets through what one of two HTTP libraries raises
            raise UnreachableError(
                f"{what}: the schema registry at {self.settings.url} does not answer: {type(exc).__name__}: {exc}"
            ) from exc

    def _client(self) -> Any:  # noqa: ANN401 - a double in tests
        if self._made_client is None:
            self._made_client = make_client(self.settings)
        return self._made_client


def registry_of(settings: RegistrySettings) -> Registry:
    """Return this process's registry at an address: what one reader has learnt, all know."""
    # A forked child makes its own: an HTTP connection must not be shared.
    return _registry(RegistrySettings.model_construct(url=settings.url, options=settings.options), os.getpid())


@cache
def _registry(settings: RegistrySettings, pid: int) -> Registry:
    return Registry(settings)


def _get_version(subject: str, number: int, client: Any) -> Any:  # noqa: ANN401 - the client library's own classes
    return client.get_version(subject, number)
