"""Reading the topics of a running ring into stories: what any caller of it could read."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from undercurrent.cli.demo.story import Story, Teller
from undercurrent.errors import DecodeError
from undercurrent.kafka.client import Isolation, KafkaSettings
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.subjects import codec_of
from undercurrent.topics import TopicPlan

_BATCH = 500


class Watch:
    """Follows generations, verdicts and acknowledgements from the ends that they have now.

    Args:
        settings: the connection.
        plan: names of the topics.
        stories: who is told.
    """

    def __init__(self, settings: KafkaSettings, plan: TopicPlan, stories: Sequence[Story]) -> None:
        lookup = OffsetLookup(settings)
        places = [p for topic in (plan.generations, plan.verdicts, plan.acks) for p in lookup.partitions(topic)]
        starts = {(place.topic, place.number): offset for place, offset in lookup.end(places).items()}
        # Committed, as every reader of verdicts should: a host may write one, die, and write it again.
        self._reader = AssignedReader(settings, starts, isolation=Isolation.READ_COMMITTED, lookup=lookup)
        self._codec = codec_of(settings)
        self._stories = tuple(stories)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def look(self, timeout_s: float) -> list[Teller]:
        """Take in what has arrived, waiting at most `timeout_s` for the first of it; return what it changed."""
        changed: dict[str, Teller] = {}
        for record in self._reader.poll_batch(_BATCH, timeout_s):
            try:
                message = self._codec.decode(record.value)
            except DecodeError:  # not the demo's to judge; the replay reads the same log and says so
                continue
            for story in self._stories:
                if (teller := story.take(message, record.offset)) is not None:
                    changed[teller.request_id] = teller
        return list(changed.values())
