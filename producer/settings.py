"""What the producer is configured with."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from undercurrent.kafka.settings import KafkaSettings


class ProducerSettings(BaseModel):
    """Configuration of a producer.

    Args:
        kafka: the connection: `bootstrap_servers`, and any librdkafka key.
        prefix: first part of every topic's name.
        prompt_partitions: partitions that the prompts topic must have; None takes what it has.
        send_timeout_s: how long a prompt may wait for room in the client's buffer and for its acknowledgement, seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kafka: KafkaSettings
    prefix: str = Field(default="undercurrent", min_length=1)
    prompt_partitions: int | None = Field(default=None, ge=1)
    send_timeout_s: float = Field(default=30.0, gt=0)
