"""Tokens gathered to one event per child and interval. No clock, no client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from undercurrent.protocol.messages import GenerationEvent, GenerationKind
from undercurrent.protocol.worker_types import RunKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What the events of a run have in common.

    Args:
        engine: name of the engine.
        incarnation: of it.
        partition: of the prompt.
        offset: of the prompt.
    """

    engine: str
    incarnation: int
    partition: int
    offset: int


@dataclass(slots=True)
class _Child:
    sent: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class DeltaBuffer:
    """Tokens that were generated and not written yet."""

    def __init__(self) -> None:
        self._origins: dict[RunKey, Origin] = {}
        self._children: dict[RunKey, dict[int, _Child]] = {}
        self._dirty: dict[RunKey, None] = {}

    @property
    def runs(self) -> tuple[RunKey, ...]:
        """Runs that are gathered for."""
        return tuple(self._origins)

    def open(self, key: RunKey, origin: Origin) -> None:
        """Begin to gather for a run."""
        self._origins[key] = origin
        self._children[key] = {}

    def close(self, key: RunKey) -> None:
        """Forget a run and what is gathered for it."""
        self._origins.pop(key, None)
        self._children.pop(key, None)
        self._dirty.pop(key, None)

    def close_all(self, partition: int) -> None:
        """Forget every run of a prompt partition."""
        for key in [key for key, origin in self._origins.items() if origin.partition == partition]:
            self.close(key)

    def add(self, key: RunKey, index: int, token_ids: tuple[int, ...], text: str) -> None:
        """Gather tokens of a child."""
        children = self._children.get(key)
        if children is None or not (token_ids or text):
            return
        child = children.setdefault(index, _Child())
        child.token_ids += token_ids
        child.text.append(text)
        self._dirty[key] = None

    def take(self, now_us: int, key: RunKey | None = None) -> Iterator[tuple[int, GenerationEvent]]:
        """Yield (prompt partition, event) for what was gathered, of one run or of all, oldest run first."""
        for run in [key] if key is not None else list(self._dirty):
            if run not in self._dirty:
                continue
            del self._dirty[run]
            origin = self._origins[run]
            for index, child in self._children[run].items():
                if child.token_ids or child.text:
                    yield origin.partition, self._event(run, origin, index, child, now_us)

    @staticmethod
    def _event(run: RunKey, origin: Origin, index: int, child: _Child, now_us: int) -> GenerationEvent:
        event = GenerationEvent(
            request_id=run.request_id,
            attempt=run.attempt,
            index=index,
            engine=origin.engine,
            incarnation=origin.incarnation,
            kind=GenerationKind.TOKENS,
            first_token_index=child.sent,
            token_ids=tuple(child.token_ids),
            text="".join(child.text),
            prompt_partition=origin.partition,
            prompt_offset=origin.offset,
            emitted_at_us=now_us,
        )
        child.sent += len(child.token_ids)
        child.token_ids, child.text = [], []
        return event
