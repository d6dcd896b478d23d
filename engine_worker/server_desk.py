"""What becomes of a control command in an API server of a bare vLLM server. No client, no engine, no clock.

    desk.added(request)        -> the commands that mean it and came before it, to be decided on in their order
    desk.decide(command)       -> what to abort and what to answer; nothing for a request that is not one of ours

Each API server knows its own requests alone, and answers for them alone. A running request is aborted and the command
answered `applied`; one that has ended, `too_late`; one that another command stopped, `already`; an attempt of a name
that has a later one here, `stale`. A probe's command is answered `held_out` where the request is one of the holdout,
and `braked` where the probe stops too many; the request goes on. Whoever has not seen the request says nothing: another
API server may have it, or it may still come. An answer promises what the client was told: there are no finals on a bare
server.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from undercurrent.capture.server_orders import safe_id
from undercurrent.protocol.brake import Brake
from undercurrent.protocol.control import Command, ControlBook
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.protocol.messages import AckOutcome
from undercurrent.protocol.worker_types import RunKey

MAX_REMEMBERED = 65_536
"""Requests that an API server remembers, ended ones beside all that run: of what it has forgotten it says nothing.

One with a long id counts for more: a header can make it tens of kilobytes.
"""

_ID_CHARS = 1024
# Requests that are looked at for each new one; where all of them run, the next one looks further.
_LOOKED_AT = 128


@dataclass(slots=True, kw_only=True)
class ServerRequest:
    """A request of this API server.

    Args:
        engine_id: vLLM's own id, never used twice.
        names: what a command may call it, each with (attempt, index) of the streams that are called so; None for a name
            that no stream has: only a command without an attempt means it then.
        sent: the engine core has it.
        aborted_by: the command that stopped it.
    """

    engine_id: str
    names: Mapping[str, tuple[int, int] | None]
    sent: bool = False
    aborted_by: str | None = None

    def is_meant_by(self, command: Command) -> bool:
        """Return whether a command that calls it by one of its names means this one."""
        message = command.message
        stream = self.names[message.request_id]
        if stream is None:
            return message.attempt is None and message.index is None
        attempt, index = stream
        return message.attempt in (None, attempt) and message.index in (None, index)


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from a command.

    Args:
        abort: requests to stop.
        outcome: the answer, to be given when they are stopped; None for none.
        attempt: that it met.
        tokens: the most that one of the requests had generated.
    """

    abort: tuple[ServerRequest, ...] = ()
    outcome: AckOutcome | None = None
    attempt: int | None = None
    tokens: int | None = None


class ServerDesk:
    """See the module.

    Args:
        book: commands and answers so far.
        tokens_of: how many tokens a request has generated, by vLLM's own id; None when it does not run.
        brake: says which probes are not listened to.
        holdout: says which requests no probe stops.
        most: requests that are remembered, as long as so many do not run at once.
    """

    def __init__(
        self,
        book: ControlBook,
        tokens_of: Callable[[str], int | None],
        *,
        brake: Brake | None = None,
        holdout: HoldoutRule | None = None,
        most: int = MAX_REMEMBERED,
    ) -> None:
        self._book = book
        self._tokens_of = tokens_of
        self._brake = brake or Brake()
        self._holdout = holdout or HoldoutRule()
        self._most = most
        self._weight = 0
        self._requests: OrderedDict[str, ServerRequest] = OrderedDict()
        self._named: dict[str, dict[str, ServerRequest]] = {}

    def __len__(self) -> int:
        """Return how many requests are remembered."""
        return len(self._requests)

    def added(self, request: ServerRequest) -> list[Command]:
        """Note a new request; return the commands that mean it already and that nobody has answered.

        All of them: the first may be a probe's that is not listened to, and the next an operator's.
        """
        # First: the new one does not run yet, and would be taken for one that has ended.
        self._weight += _weight(request)
        self._forget()
        self._requests[request.engine_id] = request
        for name in request.names:
            self._named.setdefault(name, {})[request.engine_id] = request
        self._brake.started(_run_of(request))
        waiting = (command for name in request.names for command in self._book.unanswered(name))
        return [command for command in waiting if request.is_meant_by(command)]

    def get(self, engine_id: str) -> ServerRequest | None:
        """Return a remembered request by vLLM's own id."""
        return self._requests.get(engine_id)

    def decide(self, command: Command) -> Decision:
        """Return what follows from a command that nobody has answered; its requests count as stopped from now on."""
        name, command_id = command.message.request_id, command.message.command_id
        named = list(self._named.get(name, {}).values())
        meant = [request for request in named if request.is_meant_by(command)]
        if not meant:
            later = [stream[0] for request in named if (stream := request.names[name]) is not None]
            over = command.message.attempt is not None and max(later, default=-1) > command.message.attempt
            return Decision(outcome=AckOutcome.STALE, attempt=max(later)) if over else Decision()
        attempt = max((stream[0] for request in meant if (stream := request.names[name]) is not None), default=None)
        tokens = {request.engine_id: self._tokens_of(request.engine_id) for request in meant}
        running = tuple(r for r in meant if tokens[r.engine_id] is not None and r.aborted_by is None)
        if not running:
            stopped = any(request.aborted_by is not None for request in meant)
            return Decision(outcome=AckOutcome.ALREADY if stopped else AckOutcome.TOO_LATE, attempt=attempt)
        if self._holdout.ignores(command.message):
            return Decision(outcome=AckOutcome.HELD_OUT, attempt=attempt)
        heeded = tuple(r for r in running if not self._brake.refuses(command.message, _run_of(r)))
        if not heeded:
            return Decision(outcome=AckOutcome.BRAKED, attempt=attempt)
        for request in heeded:
            request.aborted_by = command_id
        return Decision(heeded, AckOutcome.APPLIED, attempt, max(tokens[r.engine_id] or 0 for r in heeded))

    def _forget(self) -> None:
        """Forget ended requests, the oldest first: nobody can make one that runs unstoppable by sending many more."""
        for _ in range(_LOOKED_AT):
            if self._weight <= self._most or not self._requests:
                return
            engine_id, request = next(iter(self._requests.items()))
            if self._tokens_of(engine_id) is not None:
                self._requests.move_to_end(engine_id)
                continue
            del self._requests[engine_id]
            self._weight -= _weight(request)
            for name in request.names:
                named = self._named[name]
                del named[engine_id]
                if not named:
                    del self._named[name]


def _run_of(request: ServerRequest) -> RunKey:
    # Each child of a request is one of its own here, and no id of vLLM's comes twice.
    return RunKey(safe_id(request.engine_id), 1)


def _weight(request: ServerRequest) -> int:
    return 1 + len(request.engine_id) // _ID_CHARS
