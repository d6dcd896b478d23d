"""A probe as a host runs it, and what it writes: verdicts and abort commands."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from operator import index
from typing import Any

from undercurrent.core import ProbeAction, ProbeSignal
from undercurrent.errors import ProbeError
from undercurrent.probes import Binding, LoadedProbe
from undercurrent.protocol.messages import (
    ActivationBlock,
    BindingMode,
    BoundProbe,
    CommandKind,
    CommandSource,
    ControlCommand,
    ProbeVerdict,
    VerdictAction,
    VerdictKind,
)
from undercurrent.protocol.streams import StreamId

# What a probe says ends up in one verdict, which must fit its topic: these bounds keep it below 600 kB.
MAX_TEXT_CHARS = 2000
MAX_WORDS = 32

FAULTS = (Exception, SystemExit)
"""What a probe may raise: anything, and `sys.exit()` in it must not end the host, at every start again."""

Clock = Callable[[], int]
"""Microseconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One binding, its probe loaded.

    Args:
        binding: as configured.
        loaded: the probe.
    """

    binding: Binding
    loaded: LoadedProbe

    @property
    def mode(self) -> BindingMode:
        """The most that it may do."""
        return BindingMode(self.binding.mode)

    def summary(self) -> BoundProbe:
        """Return what a heartbeat says of it."""
        return BoundProbe(
            probe=self.binding.name,
            probe_version=self.loaded.version,
            point=self.binding.point,
            mode=self.mode,
        )


def set_fingerprint(bounds: Iterable[Bound]) -> str:
    """Return the SHA-256 over a set of bindings, hex: equal ones write equal verdicts."""
    digest = hashlib.sha256()
    for bound in sorted(bounds, key=lambda item: item.binding.name):
        digest.update(f"{bound.binding.name}\0{bound.mode}\0{bound.loaded.fingerprint}\n".encode())
    return digest.hexdigest()


def command_id(stream: StreamId, point: str, probe: str, token_pos: int) -> str:
    """Return the id of an abort: the same decision, made again after a crash, has the same id."""
    named = f"{stream.request_id}\0{stream.attempt}\0{stream.index}\0{point}\0{probe}\0{token_pos}"
    return hashlib.sha256(named.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The record that a verdict follows from.

    Args:
        partition: where it lies.
        offset: where in the partition.
        timestamp_us: when the broker appended it.
        captured_at_us: when its activations were captured, None where it has none.
        silent: what follows from it is written already.
    """

    partition: int
    offset: int
    timestamp_us: int
    captured_at_us: int | None = None
    silent: bool = False


class Speaker:
    """Makes the messages of one binding.

    Args:
        bound: the binding.
        service: consumer group that runs it.
        clock: tells the time that messages carry.
    """

    def __init__(self, bound: Bound, service: str, clock: Clock) -> None:
        self._bound = bound
        self._service = service
        self._clock = clock

    def verdict(self, stream: StreamId, source: Source, kind: VerdictKind, **fields: Any) -> ProbeVerdict:  # noqa: ANN401
        """Return a verdict; `fields` are those of its kind."""
        binding = self._bound.binding
        fields.setdefault("action", VerdictAction.CONTINUE)
        return ProbeVerdict(
            request_id=stream.request_id,
            attempt=stream.attempt,
            index=stream.index,
            point=binding.point,
            probe=binding.name,
            probe_version=self._bound.loaded.version,
            probe_fingerprint=self._bound.loaded.fingerprint,
            service=self._service,
            kind=kind,
            mode=self._bound.mode,
            source_partition=source.partition,
            source_offset=source.offset,
            captured_at_us=source.captured_at_us,
            decided_at_us=self._clock(),
            **fields,
        )

    def signal(
        self, stream: StreamId, source: Source, signal: ProbeSignal, clear_up_to: int
    ) -> tuple[ProbeVerdict, ControlCommand | None]:
        """Return the verdict on a signal that acts, and the abort that goes with it in mode `abort`.

        Args:
            stream: whom it concerns.
            source: the record that decided.
            signal: what the probe said; its token_pos is known.
            clear_up_to: the stream's clear mark at that record.
        """
        score = signal.score if signal.score is not None else signal.confidence
        said = self.verdict(
            stream,
            source,
            VerdictKind.SIGNAL,
            action=action_of(signal),
            score=None if score is None else float(score),
            token_pos=index_of(signal.token_pos, "token_pos"),
            layer=index_of(signal.layer, "layer"),
            clear_up_to=clear_up_to,
            metadata=words(signal.metadata),
        )
        if signal.action is not ProbeAction.ABORT or self._bound.mode is not BindingMode.ABORT:
            return said, None
        binding = self._bound.binding
        position = -1 if said.token_pos is None else said.token_pos
        name = command_id(stream, binding.point, binding.name, position)
        command = ControlCommand(
            command_id=name,
            kind=CommandKind.ABORT,
            request_id=stream.request_id,
            attempt=stream.attempt,
            index=stream.index,
            source=CommandSource.PROBE,
            service=self._service,
            probe=binding.name,
            probe_version=self._bound.loaded.version,
            point=binding.point,
            token_pos=said.token_pos,
            layer=said.layer,
            score=said.score,
            reason=f"probe {binding.name} at token {position}",
            captured_at_us=source.captured_at_us,
            published_at_us=source.timestamp_us,
            decided_at_us=said.decided_at_us,
            issued_at_us=self._clock(),
        )
        return replace(said, command_id=name), command


def action_of(signal: ProbeSignal) -> VerdictAction:
    """Return a signal's action as verdicts write it."""
    return VerdictAction(signal.action.value)


def words(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return a probe's own metadata as texts; past the first `MAX_WORDS` only how many more there are."""
    kept = {text_of(key): text_of(value) for key, value in islice(metadata.items(), MAX_WORDS)}
    return kept if len(metadata) <= MAX_WORDS else {**kept, "...": f"{len(metadata) - MAX_WORDS} more"}


def text_of(value: object) -> str:
    """Return anything as text that can be encoded, cut where it is longer than `MAX_TEXT_CHARS`."""
    text = str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 4] + " ..."


def error_of(exc: BaseException) -> str:
    """Return what a probe raised, as text; also where the exception cannot say it itself."""
    try:
        return text_of(f"{type(exc).__name__}: {exc}")
    except Exception:  # a probe's exception may raise anything in its turn
        return f"{type(exc).__name__}, which cannot be shown"


def index_of(value: Any, name: str) -> int | None:  # noqa: ANN401 - a probe gave it
    """Return a position or layer that a probe named, as an integer that a verdict can carry.

    Raises:
        ProbeError: it is none.
    """
    if value is None:
        return None
    try:
        number = index(value)
    except TypeError:
        raise ProbeError(f"{name} {value!r:.60}; accepted: an integer") from None
    if not -1 <= number < 2**31:
        raise ProbeError(f"{name} {number}; accepted: up to {2**31 - 1}")
    return number


def captured_at(block: ActivationBlock | None) -> int | None:
    """Return when a block was captured."""
    return None if block is None else block.captured_at_us
