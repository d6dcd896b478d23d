"""Which order a request of a bare server has: nobody has prepared one, and what a client says is not to be believed.

    orders = ServerOrders(ServerRules(points=("residual", "mlp"), always=("residual",), partitions=4))
    taken = orders.take(engine_id, raw)      # raw: what the client put beside its request, None for nothing
    if taken.order is not None: ...          # what is captured
    if taken.fault: ...                      # what was wrong with the client's own order, for the log
    orders.close(engine_id)

A client may add points to those that are always captured; it cannot take one away. An order that cannot be read, names
a point that is not configured, or an id that is in use, is a fault and nothing more: the request is captured as if it
had come without.

A request is called by the engine's own id, which is unique and cannot be chosen, so one client cannot write into
another's stream, or have it stopped. Where clients are trusted the name is theirs: the `request_id` of their order, or
else the id that they were answered with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from undercurrent.capture.points import MAX_ID_BYTES, Order, checked_order, order_values
from undercurrent.errors import CaptureError
from undercurrent.topics import partition_of

_ANYBODY = frozenset({"points"})
_TRUSTED = frozenset({"points", "request_id", "attempt", "index", "tenant"})
# The engine adds eight random digits to the id that the server has made, and puts the number of a child before it. The
# server's own prefix is what a client's id cannot put after such a number.
_ENGINE_ID = re.compile(r"(?:(?P<child>\d{1,6})_(?=cmpl-|chatcmpl-))?(?P<id>.+)-[0-9a-f]{8}", re.DOTALL)
_COMPLETION_ID = re.compile(r"(?P<id>cmpl-.+)-\d+", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRules:
    """What the configuration says of requests that bring no order of their own.

    Args:
        points: names of all points.
        always: names of those at which every request is captured.
        partitions: number of partitions of the activations topics.
        trusted: clients may say what a request is called.
        from_end: names of the points whose position counts from the end: only an API server knows where that is.
    """

    points: tuple[str, ...]
    always: tuple[str, ...]
    partitions: int
    trusted: bool = False
    from_end: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Taken:
    """What becomes of a request.

    Args:
        order: what is captured, None for nothing.
        fault: what was wrong with the client's order, empty where nothing was; never a value of the client's.
    """

    order: Order | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Named:
    """How commands may call a request.

    Args:
        names: each with (attempt, index) of the streams that are called so, None for a name that no stream has.
        order: takes the place of the client's order, None where that stays.
    """

    names: dict[str, tuple[int, int] | None]
    order: str | None


@dataclass(slots=True)
class ServerOrders:
    """See the module.

    Args:
        rules: of the configuration.
        clock_us: microseconds since the Unix epoch; numbers the attempts of ids that clients choose.
    """

    rules: ServerRules
    clock_us: Callable[[], int] = lambda: time.time_ns() // 1000
    _attempt: int = 0
    _in_use: dict[tuple[str, int], str] = field(default_factory=dict)
    _names: dict[str, tuple[str, int]] = field(default_factory=dict)

    def take(self, engine_id: str, raw: object, slot: int = -1) -> Taken:
        """Return what a new request is captured at, and under which name.

        Args:
            engine_id: the engine's id of it.
            raw: the client's order, untrusted; None for none.
            slot: where its API server says how long it is (see `lengths`), -1 where none does.
        """
        taken = self._take(engine_id, raw)
        order = taken.order
        if order is None:
            return taken
        if slot >= 0:
            # The slot of an order is its first child's: here each child is a request of its own.
            return replace(taken, order=replace(order, slot=slot - order.index))
        known = tuple(name for name in order.points if name not in self.rules.from_end)
        if known == order.points:
            return taken
        # The worker hears of an end some steps late: how far it has computed by then does not say which token was last.
        fault = "a point counts from the end, and nobody says where that is: the server has no ControlMiddleware"
        return Taken(replace(order, points=known) if known else None, taken.fault or fault)

    def _take(self, engine_id: str, raw: object) -> Taken:
        fault = ""
        try:
            own = name_of(engine_id) if self.rules.trusted else (safe_id(engine_id), 0)
            order = self._wanted(raw, own)
            held = self._in_use.get((order.request_id, order.index))
            if held is None:
                return self._taken(engine_id, order)
            fault = "a request with the id that a client chose is running"
        except CaptureError as exc:
            fault = str(exc)
        return Taken(self._taken(engine_id, self._order(safe_id(engine_id), ())).order, fault)

    def name(self, engine_id: str, external_id: str, index: int, raw: object) -> Named:
        """Return how commands may call a request, before it goes to the engine.

        Where clients are trusted its attempt is numbered here, and written into the order that goes on: the worker that
        captures it and the API server that stops it must mean the same.

        Args:
            engine_id: the engine's id of it.
            external_id: the id that its client is answered with.
            index: child of its request.
            raw: the client's order, untrusted; None for none.
        """
        names: dict[str, tuple[int, int] | None] = {safe_id(external_id): None}
        # Of a completion the client is told the id without the number of the prompt in its list.
        if told := _COMPLETION_ID.fullmatch(external_id):
            names[safe_id(told["id"])] = None
        text = None
        if self.rules.trusted:
            # A worker that refuses the order, or knows the name in use, captures under the engine's own id.
            with contextlib.suppress(CaptureError):
                order = self._wanted(raw, (safe_id(external_id), index))
                names[order.request_id] = (order.attempt, order.index)
                text = _text_of(order)
        return Named({**names, safe_id(engine_id): (1, 0)}, text)

    def close(self, engine_id: str) -> None:
        """Forget a request that has ended; an id that is not known is nothing."""
        name = self._names.pop(engine_id, None)
        if name is not None:
            self._in_use.pop(name, None)

    def _taken(self, engine_id: str, order: Order) -> Taken:
        if not order.points:
            return Taken(None)
        if self.rules.trusted:
            self._names[engine_id] = name = (order.request_id, order.index)
            self._in_use.setdefault(name, engine_id)
        return Taken(order)

    def _wanted(self, raw: object, own: tuple[str, int]) -> Order:
        rules = self.rules
        values = {} if raw is None else order_values(raw)
        allowed = _TRUSTED if rules.trusted else _ANYBODY
        if not values.keys() <= allowed:
            raise CaptureError(f"an order may have {', '.join(sorted(allowed))} here, and has something else")
        filled = {
            "request_id": own[0],
            "attempt": self._next_attempt() if rules.trusted and "attempt" not in values else 1,
            "index": own[1],
            "points": [],
            **values,
            "partition": 0,
        }
        order = checked_order(filled, rules.points)
        return self._order(order.request_id, order.points, order.attempt, order.index, order.tenant)

    def _order(
        self, request_id: str, points: tuple[str, ...], attempt: int = 1, index: int = 0, tenant: str | None = None
    ) -> Order:
        wanted = {*self.rules.always, *points}
        return Order(
            request_id=request_id,
            attempt=attempt,
            points=tuple(name for name in self.rules.points if name in wanted),
            partition=partition_of(request_id, self.rules.partitions),
            tenant=tenant,
            index=index,
        )

    def _next_attempt(self) -> int:
        self._attempt = max(self._attempt + 1, self.clock_us())
        return self._attempt


def _text_of(order: Order) -> str:
    values = {key: getattr(order, key) for key in sorted(_TRUSTED)}
    return json.dumps({**values, "points": list(order.points)})


def safe_id(engine_id: str) -> str:
    """Return an engine's id as a request id: itself, or its hash where no message could carry it."""
    data = engine_id.encode(errors="surrogatepass")
    plain = (
        len(data) <= MAX_ID_BYTES and "\x00" not in engine_id and not any("\ud800" <= c <= "\udfff" for c in engine_id)
    )
    return engine_id if plain and engine_id else f"sha256-{hashlib.sha256(data).hexdigest()}"


def name_of(engine_id: str) -> tuple[str, int]:
    """Return what the server calls a request, without what the engine adds; and which child of it this is.

    Args:
        engine_id: the engine's id.
    """
    found = _ENGINE_ID.fullmatch(engine_id)
    if found is None:
        return safe_id(engine_id), 0
    return safe_id(found["id"]), int(found["child"] or 0)
