"""The states of long streams on their topic: their keys, and reading them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from probe_consumers.inputs import Inputs
from undercurrent.codec import Codec
from undercurrent.errors import CodecError
from undercurrent.kafka.client import Isolation, KafkaSettings
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.protocol.host_events import StateKey
from undercurrent.protocol.messages import ProbeState

ReadStates = Callable[[int, int], Sequence[ProbeState]]
"""Given a lane and an offset of the topic of states: the last state of each stream that has one."""

_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class StatesTopic:
    """Where one service keeps the states of what it reads.

    Args:
        name: of the topic; its partitions are those of the points.
        service: consumer group.
        inputs: what it reads.
    """

    name: str
    service: str
    inputs: Inputs

    def place(self, lane: int) -> Partition:
        """Return where the states of a lane's streams lie."""
        return Partition(self.name, self.inputs.lanes.number(lane))

    def key(self, key: StateKey) -> bytes:
        """Return the key of a state's record."""
        stream, place = key.stream, self.place(key.partition)
        named = [self.service, self.inputs.point(key.partition), place.number]
        return json.dumps([*named, stream.request_id, stream.attempt, stream.index]).encode()

    def is_mine(self, key: bytes | None, lane: int) -> bool:
        """Whether a record of the topic is of this service and the point of a lane."""
        mine = json.dumps([self.service, self.inputs.point(lane)])[:-1].encode() + b", "
        return key is not None and key.startswith(mine)


class StateReader:
    """Reads the states of one service.

    Args:
        settings: the connection.
        topic: of the states.
        codec: decodes.
    """

    def __init__(self, settings: KafkaSettings, topic: StatesTopic, codec: Codec) -> None:
        self._settings = settings
        self._topic = topic
        self._codec = codec

    def __call__(self, lane: int, offset: int) -> list[ProbeState]:
        """Return the last state of each stream; see `ReadStates`.

        Raises:
            UnreachableError: the topic was not read to its end in time.
        """
        where = self._topic.place(lane)
        lookup = OffsetLookup(self._settings)
        start = max(offset, lookup.beginning([where])[where])
        found: dict[bytes, ProbeState | None] = {}
        with AssignedReader(
            self._settings, {where: start}, isolation=Isolation.READ_COMMITTED, lookup=lookup
        ) as reader:
            # What was committed with the offsets may lie behind a transaction of another host, which shares the topic.
            for record in reader.read_to_end(_DEADLINE_S, undecided=True):
                if record.key is not None and self._topic.is_mine(record.key, lane):
                    found[record.key] = self._read(record.value)
        return [state for state in found.values() if state is not None]

    def _read(self, value: bytes | None) -> ProbeState | None:
        try:
            message = self._codec.decode(value) if value else None
        except CodecError:
            return None  # as good as none: it is missed when they are counted
        return message if isinstance(message, ProbeState) else None
