"""Submits prompts and follows their generations.

    from producer import ProducerSettings, PromptProducer

    with PromptProducer(ProducerSettings(kafka={"bootstrap_servers": "localhost:9092"})) as producer:
        request_id = producer.submit("Tell me about Velmora.", max_tokens=64)
        for event in producer.follow([request_id]):
            print(event.text, end="")

`follow` ends when each request has its final.
"""

from __future__ import annotations

from producer.client import PromptProducer
from producer.follow import Follower
from producer.settings import ProducerSettings

__all__ = ["Follower", "ProducerSettings", "PromptProducer"]
