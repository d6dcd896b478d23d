"""What a worker process is made of, without a broker and without the protocol: engine, driver, ring and publisher."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine_worker.driver import EngineDriver
from engine_worker.publisher_cycle import Bound
from engine_worker.publisher_loop import PublisherLoop
from engine_worker.publisher_messages import Identity
from engine_worker.publisher_telling import PublisherSettings
from undercurrent.capture.lengths import LengthTable
from undercurrent.capture.ring import Ring
from undercurrent.codec import Codec, positions, token_ids
from undercurrent.protocol.messages import ActivationBlock, PromptRequest, Sampling, StreamEnded, StreamStarted
from undercurrent.protocol.worker_types import Prompt, RunKey
from undercurrent.spec import Overflow, parse_dict

CODEC = Codec()


def spec_point(**fields):
    """One point of a pipeline, called `p`."""
    values = {
        "name": "p", "layers": [0, 2], "tensor_type": "residual_stream", "position": "*", "execution_mode": "async",
        "queue_depth": 64, **fields,
    }  # fmt: skip
    return parse_dict({"version": 1, "extraction_points": [values]}).extraction_points[0]


class Broker:
    """Takes everything."""

    def __init__(self):
        self.messages = []

    def write(self, records, waiting):
        self.messages += [CODEC.decode(out.value) for outs in records.values() for out in outs]
        return []


@dataclass
class Published:
    """One stream as it was published."""

    positions: list = field(default_factory=list)
    token_ids: list = field(default_factory=list)
    blocks: list = field(default_factory=list)
    started: StreamStarted | None = None
    ended: StreamEnded | None = None


class Line:
    """See the module.

    Args:
        ring: between engine and publisher.
        engine: not started; it writes to the ring.
        point: that every request is captured at.
        max_held_bytes: of the publisher.
        driven: makes the engine that the driver sees.
    """

    def __init__(self, ring, engine, point, *, max_held_bytes=1 << 20):
        self.ring, self.engine = ring, engine
        self.table = LengthTable(ring.lengths)
        self.driver = EngineDriver(engine, self, self.table)
        self.prompts, self.tokens, self.finals, self.text = {}, defaultdict(list), {}, defaultdict(str)
        self.rejected, self.failures, self.held, self.past_end = [], [], [0], 0
        self.broker = Broker()
        self._stop = threading.Event()
        settings = PublisherSettings(
            ring=ring.path, identity=Identity(engine="e", incarnation=1, model="m"), kafka={}, topics={"p": "t"},
            partitions={"p": 1}, max_record_bytes={"p": 1 << 20}, interval_ms=2.0, max_held_bytes=max_held_bytes,
            bounds={"p": Bound(point.overflow or Overflow.DROP_NEWEST, point.queue_depth)},
        )  # fmt: skip
        loop = PublisherLoop(
            settings, ring.reader(), self.broker, self._hear_report, self._stop.wait, lengths=ring.lengths
        )
        self._thread = threading.Thread(target=loop.run)

    @asynccontextmanager
    async def running(self):
        self._thread.start()
        try:
            await self.engine.start()
            yield self
        finally:
            await self.driver.close()
            await self.engine.close()
            self._stop.set()
            await asyncio.to_thread(self._thread.join)
            self.ring.close()

    def _hear_report(self, report):
        self.held.append(report.held_bytes)
        self.past_end += report.past_end

    # The driver's listener.

    def on_delta(self, key, delta, generated):
        self.tokens[key, delta.index] += delta.token_ids
        self.text[key, delta.index] += delta.text
        assert len(self.tokens[key, delta.index]) == generated
        if delta.finish_reason is not None:
            self.finals[key, delta.index] = (delta.finish_reason, delta.prompt_tokens + generated)

    def on_rejected(self, key, defect):
        self.rejected.append(defect)

    def on_failure(self, error):
        self.failures.append(error)

    # What a test does.

    def start(self, name, attempt=1, prompt=(97, 98, 99), **sampling):
        """Give a request to the driver; on its loop."""
        request = PromptRequest(
            request_id=name, prompt_token_ids=tuple(prompt), sampling=Sampling(**sampling), skip_prefix_cache=True,
            created_at_us=0,
        )  # fmt: skip
        ready = Prompt(
            request_id=name, offset=0, content_hash=b"", n=request.sampling.n, request=request, points=("p",)
        )
        key = RunKey(name, attempt)
        self.prompts[key] = list(prompt)
        self.driver.start(key, ready)
        return key

    async def until(self, condition, timeout_s=20):
        async with asyncio.timeout(timeout_s):
            while not condition():
                assert not self.failures
                await asyncio.sleep(0.001)

    async def idle(self, timeout_s=20):
        """Wait until no request runs, and the engine has taken its last step."""
        await self.until(lambda: not self.driver.running, timeout_s)
        steps = -1
        while steps != self.engine.steps:
            steps = self.engine.steps
            await asyncio.sleep(0.05)

    def streams(self):
        """Return what was published by (run, child)."""
        found = defaultdict(Published)
        for message in self.broker.messages:
            if not isinstance(message, StreamStarted | StreamEnded | ActivationBlock):
                continue
            stream = found[RunKey(message.request_id, message.attempt), message.index]
            assert stream.ended is None, "something came after the end of its stream"
            if isinstance(message, StreamStarted):
                stream.started = message
            elif isinstance(message, StreamEnded):
                stream.ended = message
            else:
                stream.positions += positions(message).tolist()
                stream.token_ids += token_ids(message).tolist()
                stream.blocks.append(message)
        return found

    def check(self, *, complete=False):
        """Every published position lies before the final length and carries its token, none before it is missing.

        Args:
            complete: the last token has a row as well, since the engine always goes on past it.
        """
        found = self.streams()
        for (key, index), (reason, length) in self.finals.items():
            stream = found[key, index]
            sequence = self.prompts[key] + self.tokens[key, index]
            assert len(sequence) == length
            assert stream.positions == list(range(len(stream.positions)))
            assert stream.token_ids == sequence[: len(stream.positions)]
            assert len(stream.positions) <= length
            if complete:
                assert len(stream.positions) == length
            if reason != "abort":
                # The last token was sampled; it has a row only where the engine went on past it.
                assert len(stream.positions) >= length - 1
            if stream.positions:
                end = stream.ended
                assert (end.emitted[0], end.dropped[0]) == (len(stream.positions), 0)
                assert end.last_pos == stream.positions[-1]
        return found


def new_ring(slots=64, ring_bytes=1 << 20):
    return Ring.create(ring_bytes, slots=slots)
