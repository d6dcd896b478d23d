"""Which of the client library's error codes mean what to us.

Codes that begin with an underscore are librdkafka's own, as against the broker's; their names are public.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from confluent_kafka import KafkaError

TIMED_OUT = KafkaError._TIMED_OUT
END_OF_PARTITION = KafkaError._PARTITION_EOF

OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._NO_OFFSET})
NOT_ALLOWED = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED})
GROUP_NOT_ALLOWED = frozenset({KafkaError.GROUP_AUTHORIZATION_FAILED})
ID_NOT_ALLOWED = frozenset({KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED})
MISSING = frozenset({KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART})

LEADER_MOVED = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    }
)

NOT_YET_FETCHING = frozenset({KafkaError._STATE, KafkaError._PREV_IN_PROGRESS, KafkaError._UNKNOWN_PARTITION})
"""A seek came before the assignment reached the fetcher."""

RETRIABLE_COMMIT = frozenset(
    {KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._WAIT_COORD, KafkaError.REBALANCE_IN_PROGRESS}
)

FENCED = frozenset(
    {
        KafkaError._FENCED,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)

ABORTABLE = frozenset(
    {
        # This member no longer owns its partitions,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.REBALANCE_IN_PROGRESS,
        # or the broker gave the transaction up.
        KafkaError.INVALID_TXN_STATE,
        KafkaError.TRANSACTION_ABORTABLE,
    }
)

TRANSACTION_GONE = KafkaError.INVALID_TXN_STATE
"""Fatal where a broker that was down ended the transaction, by its timeout, before the client could.

An owner that lost its id is told so first: by its epoch.
"""

COORDINATOR_BUSY = frozenset(
    {KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR}
)
"""Who keeps a group's offsets has just changed, or has just started."""

RETRIABLE = frozenset({KafkaError._TIMED_OUT, KafkaError.COORDINATOR_LOAD_IN_PROGRESS})
