"""An administrative client whose answers are waited for within a time, and whose errors are this package's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaException

from undercurrent.errors import TopicError, UnreachableError
from undercurrent.kafka.client import KafkaSettings, error_of, make_admin, reason_of

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

T = TypeVar("T")

# The client itself gives up after the time that it was told; this is for its saying so.
_LATE_S = 5.0


class Asking:
    """Asks brokers, with one client as long as that reaches them.

    Args:
        settings: the connection.
        timeout_s: how long an answer may take.
        refused: what is raised where the brokers answer that it cannot be done.
    """

    def __init__(
        self, settings: KafkaSettings, timeout_s: float, *, refused: Callable[[str], Exception] = TopicError
    ) -> None:
        self.timeout_s = timeout_s
        self._settings = settings
        self._refused = refused
        self._client: AdminClient | None = None

    @property
    def client(self) -> Any:  # noqa: ANN401 - the stub of AdminClient leaves out the keyword arguments that are used
        """The client.

        Raises:
            ConfigError: librdkafka refuses the configuration.
        """
        if self._client is None:
            self._client = make_admin(self._settings)
        return self._client

    def forget(self) -> None:
        """Have the next question asked by another client: this one may have lost its brokers for good."""
        self._client = None

    def result(self, future: Future[T], what: str) -> T:
        """Return an answer.

        Args:
            future: of the answer.
            what: is the matter where there is none, as "topics cannot be listed".

        Raises:
            UnreachableError: no broker answered in time.
            Exception: `refused`, where one did.
        """
        try:
            return future.result(self.timeout_s + _LATE_S)
        except (KafkaException, FutureTimeoutError) as exc:
            raise self._error(exc, what) from exc

    def done(self, future: Future[Any], what: str, *, unless: int) -> None:
        """Wait until something is done; the error code `unless` says that it was so before. Raises as `result` does."""
        try:
            future.result(self.timeout_s + _LATE_S)
        except (KafkaException, FutureTimeoutError) as exc:
            error = error_of(exc) if isinstance(exc, KafkaException) else None
            if error is None or error.code() != unless:
                raise self._error(exc, what) from exc

    def _error(self, exc: KafkaException | FutureTimeoutError, what: str) -> Exception:
        if not isinstance(exc, KafkaException):
            self.forget()
            return UnreachableError(f"{what}: no answer in {self.timeout_s:g} s")
        error = error_of(exc)
        if error is not None and not error.name().startswith("_"):
            return self._refused(f"{what}: {reason_of(exc)}")
        self.forget()
        return UnreachableError(f"{what}: {reason_of(exc)}")
