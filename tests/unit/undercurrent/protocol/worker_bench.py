"""One core of the engine worker's protocol, the log that it reads, and what it wants done."""

from __future__ import annotations

from collections import Counter

from tests.unit import messages
from undercurrent.protocol.epochs import Position
from undercurrent.protocol.messages import (
    CommandKind,
    CommandSource,
    ControlCommand,
)
from undercurrent.protocol.worker import WorkerCore
from undercurrent.protocol.worker_types import (
    Now,
    Prompt,
    Publish,
    Start,
    WorkerLimits,
)

LIMITS = WorkerLimits(max_in_flight=2, max_waiting=4, handover_s=2.0, shutdown_s=2.0, stream_end_timeout_s=3.0)

CLAIM = messages.accepted(attempt=2, engine="dead", incarnation=3, epoch=2, content_hash=b"h")


class Bench:
    """A core that owns the partition of its requests, and a log that it reads."""

    def __init__(self, limits=LIMITS, guards=None, brake=None, holdout=None):
        self.now_s = 10.0
        self.core = WorkerCore("e", 100, 1, limits, guards, brake, holdout)
        self.actions = []
        self.log = []
        self.do(self.core.acquired(0, Position(offset=0, epoch=5, read_from=0), self.now))
        self.do(self.core.caught_up(0, 5, self.now))
        self.take()
        self.sent = 0
        self.generated = Counter()

    @property
    def now(self):
        return Now(self.now_s, int(self.now_s * 1e6))

    def do(self, actions):
        self.actions += actions

    def take(self, kind=object):
        """Return the actions of a kind since the last call."""
        found, self.actions = [a for a in self.actions if isinstance(a, kind)], []
        return found

    def send(self, request_id, **fields):
        prompt = Prompt(request_id=request_id, offset=self.sent, content_hash=b"h", points=("p",), **fields)
        self.sent += 1
        self.do(self.core.prompt(0, 5, prompt, self.now))
        return prompt

    def write(self, message, epoch=5):
        """Append a record to the log, and let the core read it."""
        self.log.append(message)
        self.do(self.core.generation(0, epoch, len(self.log) - 1, message, self.now))

    def flush(self, epoch=5):
        """Write what the core wants to publish, and what it wants then."""
        while action := next((a for a in self.actions if isinstance(a, Publish)), None):
            self.actions.remove(action)
            self.write(action.message, epoch)

    def start(self, request_id, **fields):
        self.send(request_id, **fields)
        self.flush()
        (start,) = self.take(Start)
        return start.key

    def wait(self, seconds, step_s=0.5):
        end = self.now_s + seconds
        while self.now_s < end:
            self.now_s = min(end, self.now_s + step_s)
            self.do(self.core.tick(self.now))

    def delta(self, key, tokens, reason=None, index=0):
        self.generated[key, index] += tokens
        self.do(self.core.delta(key, index, self.generated[key, index], reason, self.now))

    def published(self):
        return [action.message for action in self.take(Publish)]


def order(request_id, attempt=None, name="c", index=None):
    return ControlCommand(
        command_id=name,
        kind=CommandKind.ABORT,
        request_id=request_id,
        attempt=attempt,
        index=index,
        source=CommandSource.OPERATOR,
        captured_at_us=1,
        issued_at_us=0,
    )
