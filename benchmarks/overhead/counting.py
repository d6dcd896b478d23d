"""What a consumer finds in a topic after a visit; it reads when the engine sleeps, and takes nothing from it before."""

from __future__ import annotations

from dataclasses import dataclass

from undercurrent.codec.avro import Codec
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.protocol.messages import ActivationBlock, StreamEnded

READ_S = 60.0


@dataclass(slots=True)
class Counts:
    """Activations, each a (token, layer), and where they are from.

    Args:
        records: that hold them.
        activations: in those records.
        ended: streams of which the end was found.
        emitted: activations that these ends speak of.
        dropped: the same, of those that were lost.
    """

    records: int = 0
    activations: int = 0
    ended: int = 0
    emitted: int = 0
    dropped: int = 0


class Consumer:
    """Counts what comes after it was made.

    Args:
        settings: the connection.
        topic: whose records.
    """

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        lookup = OffsetLookup(settings)
        self._settings = settings
        self._starts: dict[Partition, int] = lookup.end(lookup.partitions(topic))

    def read(self) -> Counts:
        """Read to the end of the topic, and count."""
        codec, counts = Codec(), Counts()
        with AssignedReader(self._settings, self._starts) as reader:
            for record in reader.read_to_end(READ_S):
                match codec.decode(record.value):
                    case ActivationBlock(positions=positions, layers=layers):
                        counts.records += 1
                        counts.activations += len(positions) // 4 * len(layers)
                    case StreamEnded(emitted=emitted, dropped=dropped):
                        counts.ended += 1
                        counts.emitted += sum(emitted)
                        counts.dropped += sum(dropped)
        return counts


def check_counts(variant: str, computed: int, requests: int, acknowledged: int, found: Counts) -> None:
    """End the benchmark where engine, broker and consumer do not agree to the last activation.

    Args:
        variant: of the visit.
        computed: activations that the engine's requests have: positions computed times layers.
        requests: that it ran.
        acknowledged: records that the broker has acknowledged.
        found: by the consumer.
    """
    agree = {
        "activations computed by the engine": computed,
        "activations read by the consumer": found.activations,
        "activations that the streams' ends speak of": found.emitted,
    }
    records = {"records acknowledged by the broker": acknowledged, "records read by the consumer": found.records}
    streams = {"requests of the engine": requests, "ends of streams read": found.ended}
    for counts in (agree, records, streams, {"activations lost": found.dropped, "that may be": 0}):
        if len(set(counts.values())) > 1:
            raise SystemExit(f"{variant}: counts differ: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
