"""A pipeline's topics in memory, as an export reads them and as a run of it would have written them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from probe_consumers.dataset_export import ExportOrder, export
from probe_consumers.dataset_import import DatasetImport
from probe_consumers.dataset_source import TopicPart
from probe_consumers.replay import Span
from probe_consumers.replay_range import RangeRequest
from tests.unit.messages import accepted, event
from undercurrent.codec import Codec
from undercurrent.evaluation.labels import key_of
from undercurrent.protocol.messages import (
    BindingMode,
    GenerationKind,
    Label,
    LabelValue,
    Outcome,
    ProbeVerdict,
    PromptRequest,
    Sampling,
    VerdictAction,
    VerdictKind,
)
from undercurrent.testing.memory_topics import MemoryTopics
from undercurrent.testing.streams import StreamBuilder
from undercurrent.topics import TopicPlan, partition_of

CODEC = Codec()


class Topics:
    """Topics of a pipeline; `deleted` is how many records of each partition retention has deleted."""

    codec = CODEC

    def __init__(self, *points: str, partitions: int = 2) -> None:
        self.plan = TopicPlan(points=points or ("residual",), activation_partitions=partitions)
        self.logs = MemoryTopics(self.plan, lambda: 1_000_000)
        self.deleted: dict[str, int] = {}

    def part(self, topic: str, asked: RangeRequest, *, committed: bool = False) -> TopicPart | None:
        count = next((item.partitions for item in self.plan.topics() if item.name == topic), 0)
        gone = self.deleted.get(topic, 0)
        spans = {number: Span(gone, self.logs.end(topic, number)) for number in range(count)}
        records = (record for number in spans for record in self.logs.read(topic, number, gone))
        return TopicPart(spans, dict.fromkeys(spans, gone), records)

    def activations(self, stream: StreamBuilder, *values: bytes, point: str = "residual") -> None:
        for value in values:
            self.logs.append(self.plan.activations(point), value, key=stream.key)

    def prompt(self, request_id: str, text: str | None = None, **fields: Any) -> None:
        prompt = f"hello {request_id}" if text is None else text
        message = PromptRequest(
            request_id=request_id, prompt=prompt, sampling=Sampling(), **({"created_at_us": 1} | fields)
        )
        self._append(self.plan.prompts, request_id, message)

    def answer(self, request_id: str, *texts: str, attempt: int = 1, **fields: Any) -> None:
        """Write what a request generated, one piece of text an event, and its final."""
        self._append(self.plan.generations, request_id, accepted(request_id, attempt))
        for text in texts:
            tokens = event(request_id, attempt, kind=GenerationKind.TOKENS, text=text)
            self._append(self.plan.generations, request_id, tokens)
        final = {"outcome": Outcome.COMPLETED, "finish_reason": "stop", "generated_tokens": len(texts)} | fields
        self._append(self.plan.generations, request_id, event(request_id, attempt, kind=GenerationKind.FINAL, **final))

    def scores(self, request_id: str, positions: list[int], scores: list[float], *, layer: int = 3) -> None:
        verdict = ProbeVerdict(
            request_id=request_id,
            attempt=1,
            point="residual",
            probe="guard",
            service="s",
            kind=VerdictKind.WATERMARK,
            mode=BindingMode.SHADOW,
            action=VerdictAction.CONTINUE,
            score_positions=np.array(positions, "<i4").tobytes(),
            score_layers=(layer,),
            scores=np.array(scores, "<f4").tobytes(),
            source_partition=0,
            source_offset=0,
            decided_at_us=0,
        )
        self._append(self.plan.verdicts, request_id, verdict)

    def label(self, request_id: str, value: str, *, source: str = "ann", name: str = "bad", **fields: Any) -> bytes:
        message = Label(
            request_id=request_id, name=name, value=LabelValue(value), source=source, created_at_us=1, **fields
        )
        self.logs.append(self.plan.labels, CODEC.encode(message), key=key_of(message))
        return key_of(message)

    def export(self, folder: Any, **fields: Any) -> dict[str, Any]:
        return export(self, self.plan, ExportOrder(**({"points": self.plan.points} | fields)), folder)

    def imported(self, folder: Any) -> tuple[Topics, DatasetImport]:
        """Return fresh topics with the streams of a dataset."""
        fresh = Topics(*self.plan.points, partitions=self.plan.activation_partitions)

        run = DatasetImport(folder)
        for item in run.messages():
            fresh.logs.append(fresh.plan.activations(item.point), item.value, key=item.request_id.encode())
        return fresh, run

    def _append(self, topic: str, request_id: str, message: Any) -> None:
        count = self.plan.prompt_partitions
        self.logs.append(
            topic, CODEC.encode(message), key=request_id.encode(), partition=partition_of(request_id, count)
        )


def rows(request_id: str, count: int, *, layers: int = 2, width: int = 4, dtype: Any = np.float32) -> np.ndarray:
    """Return values [count, layers, width] that no other request has."""
    rng = np.random.default_rng(sum(request_id.encode()) * 1009 + len(request_id))
    return rng.normal(size=(count, layers, width)).astype(np.float32).astype(dtype)


LAYERS = (3, 5)
NAMES = [f"r{number}" for number in range(12)]


def recorded() -> Topics:
    """Twelve requests at once, bfloat16, two prompt tokens and five generated ones."""
    made = Topics()
    streams = {name: StreamBuilder(name, layers=LAYERS, prompt_len=2, dtype="bfloat16") for name in NAMES}
    values = {name: rows(name, 7, dtype=ml_dtypes.bfloat16) for name in NAMES}
    for name, stream in streams.items():
        made.prompt(name, f"prompt of {name}", metadata={"user": f"u{int(name[1:]) % 5}"})
        made.activations(stream, stream.start(), stream.block([0, 1], values[name][:2]))
    for step in range(2, 7):
        for name, stream in streams.items():
            made.activations(stream, stream.block([step], values[name][step], step=step))
    for name, stream in streams.items():
        made.activations(stream, stream.end())
        made.answer(name, "ab", "c")
    made.scores("r1", [2, 3], [0.5, -1.0])
    made.label("r1", "positive", token_start=3, token_end=5)
    made.label("r2", "negative")
    return made
