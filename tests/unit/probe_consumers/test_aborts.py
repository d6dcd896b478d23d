"""What the abort writer says of commands that did not arrive."""

from __future__ import annotations

import pytest

from probe_consumers.aborts import AbortWriter
from undercurrent.codec import Codec
from undercurrent.errors import ProducerFatalError, UnreachableError
from undercurrent.kafka.publisher import Delivery, DeliveryError, OnDelivery
from undercurrent.protocol.messages import CommandKind, CommandSource, ControlCommand

COMMAND = ControlCommand(
    command_id="c", kind=CommandKind.ABORT, request_id="r", attempt=1, source=CommandSource.PROBE, issued_at_us=0
)
TIMED_OUT = DeliveryError("_MSG_TIMED_OUT", "timed out", fatal=False)
FENCED = DeliveryError("INVALID_PRODUCER_EPOCH", "fenced", fatal=True)


class Client:
    """A publisher that refuses what it is told to refuse."""

    def __init__(self, refusals: list[DeliveryError | None], left: int = 0) -> None:
        self.refusals = refusals
        self.left = left

    def produce(self, *_: object, **__: object) -> DeliveryError | None:
        return self.refusals.pop(0)

    def poll(self, _timeout_s: float) -> int:
        return 0

    def flush(self, _timeout_s: float) -> int:
        return self.left


def writer(client: Client) -> AbortWriter:
    return AbortWriter(client, "control", Codec())  # type: ignore[arg-type]


def test_a_command_that_did_not_arrive_is_told_once_and_may_be_sent_again() -> None:
    aborts = writer(Client([TIMED_OUT, None]))
    aborts.send(COMMAND)
    with pytest.raises(UnreachableError, match="timed out"):
        aborts.flush()
    aborts.send(COMMAND)
    aborts.flush()


def test_a_command_without_an_answer_holds_the_transaction_up() -> None:
    client = Client([None], left=1)
    aborts = writer(client)
    aborts.send(COMMAND)
    with pytest.raises(UnreachableError, match="1 without an answer"):
        aborts.flush()
    client.left = 0
    aborts.flush()


def test_a_client_that_can_write_nothing_any_more_ends_the_host() -> None:
    aborts = writer(Client([FENCED]))
    aborts.send(COMMAND)
    with pytest.raises(ProducerFatalError, match="fenced"):
        aborts.flush()


class Appended(Client):
    """A publisher whose broker has a clock of its own."""

    def produce(self, *_: object, on_delivery: OnDelivery, **__: object) -> DeliveryError | None:
        on_delivery(Delivery("control", 0, 1, None, appended_at_us=5_000_000))
        return None


def test_how_far_this_machines_clock_is_ahead_is_known_from_the_first_record() -> None:
    aborts = AbortWriter(Appended([]), "control", Codec(), clock=lambda: 7_205_000_000)  # type: ignore[arg-type]
    aborts.send(COMMAND)
    assert aborts.clock_ahead_us == 7_200_000_000


class Late(Appended):
    """A publisher that tells of an acknowledgement when it is asked to."""

    def produce(self, *_: object, on_delivery: OnDelivery, **__: object) -> DeliveryError | None:
        self.told = on_delivery
        return None

    def flush(self, _timeout_s: float) -> int:
        super().produce(on_delivery=self.told)
        return 0


def test_an_acknowledgement_that_is_heard_late_moves_no_clock() -> None:
    now_us = 5_000_000
    aborts = AbortWriter(Late([]), "control", Codec(), clock=lambda: now_us)  # type: ignore[arg-type]
    aborts.send(COMMAND)
    now_us += 30_000_000
    aborts.flush()
    assert aborts.clock_ahead_us == 0
