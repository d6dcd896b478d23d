"""A text planted wherever text comes into a pipeline, and what the topics say of it in words of ours.

ids = plant_texts(bench, tokens)
finals = bench.wait_finals(ids)
assert found_texts({"log": worker.log.read_text(), **words_on_topics(bench)}, tokens=tokens) == []
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from undercurrent.errors import DecodeError
from undercurrent.protocol.dead_letters import PREFIX
from undercurrent.protocol.messages import (
    GenerationEvent,
    ProbeVerdict,
    PromptRequest,
    Sampling,
    StreamEnded,
)
from undercurrent.testing.canaries import TEXT_CANARY
from undercurrent.testing.engine_bench import EngineBench

FAILED = frozenset({"too-long", "wrong", "points"})
"""Of what is planted, the requests that cannot run."""
LETTERS = 4
"""Of what is planted, prompts that become dead letters."""


def plant_texts(bench: EngineBench, tokens: Sequence[int]) -> list[str]:
    """Write the text onto the topics in every form that they take; return the requests that get a final.

    Args:
        bench: the pipeline; it has a point `residual`.
        tokens: the text, as the engine's token ids.
    """
    ids = bench.send([TEXT_CANARY], max_tokens=8)
    whole: dict[str, Any] = {"metadata": {"note": TEXT_CANARY}, "tenant": "acme", "created_at_us": 1}
    requests: dict[str, dict[str, Any]] = {
        "whole": {"prompt": TEXT_CANARY, "sampling": Sampling(max_tokens=4, stop=(TEXT_CANARY,))},
        "tokens": {"prompt": None, "prompt_token_ids": tuple(tokens), "sampling": Sampling(max_tokens=4)},
        "too-long": {"prompt": TEXT_CANARY * 1000, "sampling": Sampling(max_tokens=4)},
        "wrong": {"prompt": TEXT_CANARY, "sampling": Sampling(max_tokens=-1, stop=(TEXT_CANARY,))},
        "model": {"prompt": TEXT_CANARY, "model": "another", "sampling": Sampling(max_tokens=4)},
        "points": {"prompt": TEXT_CANARY, "points": ("nowhere",), "sampling": Sampling(max_tokens=4)},
    }
    for name, fields in requests.items():
        bench.send_request(PromptRequest(request_id=name, **(whole | fields)))
        ids.append(name)
    # What is no prompt, or not where it belongs, becomes a dead letter.
    bench.send_bytes(b"garbage", TEXT_CANARY.encode())
    bench.send_bytes(b"json", json.dumps({"prompt": TEXT_CANARY}).encode())
    cut = PromptRequest(request_id="cut", prompt=TEXT_CANARY, sampling=Sampling(), **whole)
    bench.send_bytes(b"cut", bench.codec.encode(cut)[:-30])
    other = PromptRequest(request_id="another", prompt=TEXT_CANARY, sampling=Sampling(), created_at_us=1)
    bench.send_bytes(b"misplaced", bench.codec.encode(other))
    bench.write(bench.plan.activations("residual"), 0, b"r", TEXT_CANARY.encode())
    bench.write(bench.plan.control, 0, b"r", TEXT_CANARY.encode())
    return ids


def words_on_topics(bench: EngineBench) -> dict[str, str]:
    """Return every word of ours that stands on a topic beside what users wrote and models generated."""
    told: dict[str, list[object]] = {"errors": [], "headers": []}
    plan = bench.plan
    for topic in (plan.generations, plan.acks, plan.activations("residual"), plan.verdicts):
        for record in bench.read(topic):
            try:
                message = bench.codec.decode(record.value)
            except DecodeError as exc:  # the text itself, that is no message
                told["errors"].append(str(exc))
                continue
            match message:
                case GenerationEvent() | ProbeVerdict():
                    told["errors"].append(message.error)
                case StreamEnded():
                    told["errors"].append(message.detail)
    for topic in (plan.prompts, plan.activations("residual"), plan.control):
        for record in bench.read(plan.dlq(topic)):
            told["headers"] += [value for name, value in record.headers if name.startswith(PREFIX)]
    return {name: repr(words) for name, words in told.items()}
