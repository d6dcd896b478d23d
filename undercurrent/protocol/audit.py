"""Checks the record: what every topic says, joined by request, and everything in it that breaks a promise.

    audit = Audit("undercurrent", whole=True)
    for heard in ...:                       # each partition in its order, the topics in any order between them
        audit.take(heard)
    for finding in audit.findings():
        ...

It knows nothing but the topics, and applies the rules that every reader applies: `generations` says which final is
valid, `streams` what is open. Of a request that is over, with all that was to be said of it, a few bytes are kept.

What began before the part that is read is not judged: a request is when its prompt is in that part, or when there are
no prompts at all, as on a server that answers HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from undercurrent.protocol.audit_findings import Finding, FindingKind
from undercurrent.protocol.audit_request import Ended, Note, Request
from undercurrent.protocol.audit_rules import Rules
from undercurrent.protocol.audit_streams import Begun, DeclaredLost, Over, StreamName, StreamSide
from undercurrent.protocol.audit_verdicts import Voice
from undercurrent.protocol.dead_letters import Place
from undercurrent.protocol.generations import GenerationsReader, Ruling
from undercurrent.protocol.messages import (
    Accepted,
    AckOutcome,
    CommandKind,
    ControlAck,
    ControlCommand,
    EngineStarted,
    GenerationEvent,
    GenerationKind,
    Message,
    ProbeHeartbeat,
    ProbeVerdict,
    PromptRequest,
    Released,
    VerdictKind,
)
from undercurrent.topics import DLQ_SUFFIX

__all__ = ["Audit", "AuditCounts", "Finding", "FindingKind", "Heard"]

# What each topic takes; activations have a reader of their own, the others are none of an audit's.
_TAKES: Mapping[str, tuple[type, ...]] = {
    "prompts": (PromptRequest,),
    "generations": (Accepted, Released, GenerationEvent),
    "control": (ControlCommand, ProbeHeartbeat),
    "control.acks": (EngineStarted, ControlAck),
    "verdicts": (ProbeVerdict, ProbeHeartbeat),
}

# Which streams a probe has ended, or only joins, and how a request was held: equal for nearly all of them, and so kept
# once.
_Words = frozenset[tuple[StreamName, str, str, VerdictKind | None]]


class Heard(NamedTuple):
    """One record of any topic, decoded.

    Args:
        topic: full name.
        partition: its number.
        offset: where in the partition.
        at_ms: when the broker appended it, milliseconds since the Unix epoch.
        key: as text, empty where it is none.
        message: what it says; None where it cannot be read, and for dead letters.
        source: of a dead letter, the record that it speaks of.
        said: of a dead letter, what it says of that record.
    """

    topic: str
    partition: int
    offset: int
    at_ms: int
    key: str
    message: Message | None
    source: Place | None = None
    said: Mapping[str, str] | None = None


@dataclass(slots=True)
class AuditCounts:
    """What was read.

    Args:
        prompts: prompts.
        over: requests with all of their finals.
        streams: streams that opened.
        words: results and errors of probes.
        void: claims, tokens and finals that count for nobody, as a worker writes that was taken for dead.
        unreadable: records that are no message.
        letters: dead letters.
    """

    prompts: int = 0
    over: int = 0
    streams: int = 0
    words: int = 0
    void: int = 0
    unreadable: int = 0
    letters: int = 0


class _Done(NamedTuple):
    """A request that is over, with nothing wrong and nothing outstanding.

    Args:
        attempt: that closed it.
        incarnation: of that attempt.
        n: children.
        held: attempts that held it.
        words: what was said of its streams.
    """

    attempt: int
    incarnation: int
    n: int
    held: frozenset[int]
    words: _Words


class Audit:
    """See the module.

    Args:
        prefix: first part of the topics' names.
        whole: every topic is read from its first record.
        unjudged: points that no probe reads.
    """

    def __init__(self, prefix: str, *, whole: bool = False, unjudged: Collection[str] = ()) -> None:
        self.counts = AuditCounts()
        self._prompts_topic = f"{prefix}.prompts"
        self._activations = f"{prefix}.activations."
        self._takes: Mapping[str, tuple[type, ...]] = {f"{prefix}.{name}": kinds for name, kinds in _TAKES.items()}
        self._whole = whole
        self._unjudged = frozenset(unjudged)
        self._reader = GenerationsReader()
        self._streams = StreamSide()
        self._requests: dict[str, Request] = {}
        self._done: dict[str, _Done] = {}
        self._kept: dict[_Done, _Done] = {}
        self._settled_early: dict[tuple[int, int], bool] = {}  # whether as a repeat
        self._letters: set[Place] = set()
        self._unplaced: dict[Place, tuple[int, str]] = {}
        self._heard_ms: dict[str, int] = {}
        # Of requests that are over, and have streams at several points, or one that nobody judges alone: when they
        # began, and when they were heard of.
        self._done_ms: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Return how many requests are known in full: those that are not over, or have something wrong."""
        return len(self._requests)

    # --- records

    def take(self, heard: Heard) -> None:
        """Take the next record of a partition."""
        message = heard.message
        if heard.topic.endswith(DLQ_SUFFIX):
            self._letter(heard)
        elif message is None or not isinstance(message, self._takes.get(heard.topic, object)):
            self._unreadable(heard)
        elif heard.topic.startswith(self._activations):
            self._activation(heard, message)
        elif isinstance(message, PromptRequest):
            self._prompt(heard, message.request_id if message.request_id == heard.key else "")
        elif isinstance(message, Accepted | Released | GenerationEvent):
            self._generation(heard, message)
        elif isinstance(message, ProbeVerdict):
            self.counts.words += message.kind in (VerdictKind.RESULT, VerdictKind.ERROR)
            self._heard_of(message.point, heard.at_ms)
            request = self._request(message.request_id, heard)
            request.take_verdict(message)
            self._settle(request)
        elif isinstance(message, ControlCommand | ControlAck):
            self._order(heard, message)
        elif isinstance(message, ProbeHeartbeat):
            for bound in message.probes:
                self._heard_of(bound.point, heard.at_ms)

    def _heard_of(self, point: str, at_ms: int) -> None:
        self._heard_ms[point] = min(at_ms, self._heard_ms.get(point, at_ms))

    def _letter(self, heard: Heard) -> None:
        source = heard.source
        if source is None:
            return  # somebody else's record, or the note of a requeue
        self.counts.letters += 1
        expected = self._unplaced.pop(source, None) is not None
        if not expected or source.topic == self._prompts_topic:
            self._letters.add(source)

    def _unreadable(self, heard: Heard) -> None:
        self.counts.unreadable += 1
        if heard.topic == self._prompts_topic and self._prompt(heard, heard.key):
            return  # a repeat, known by its key: it was answered, and has no letter of its own
        if heard.topic in self._takes or heard.topic.startswith(self._activations):
            self._expect_letter(heard, "it cannot be read")

    def _expect_letter(self, heard: Heard, why: str) -> None:
        place = Place(heard.topic, heard.partition, heard.offset)
        if place not in self._letters:
            self._unplaced[place] = (heard.at_ms, why)

    def _prompt(self, heard: Heard, request_id: str) -> bool:
        """Take a prompt; return whether it is known to have been answered as a repeat."""
        self.counts.prompts += 1
        request, place = self._request(request_id, heard), (heard.partition, heard.offset)
        request.asked = True
        repeat = self._settled_early.pop(place, None)
        if repeat is None:
            request.waiting.add(place)
        self._settle(request)
        return bool(repeat)

    def _answered(self, request: Request, place: tuple[int, int], *, repeat: bool = False) -> None:
        if place not in request.waiting:
            self._settled_early[place] = repeat
            return
        request.waiting.discard(place)
        if repeat:
            self._unplaced.pop(Place(self._prompts_topic, *place), None)

    def _generation(self, heard: Heard, message: Accepted | Released | GenerationEvent) -> None:
        request = self._request(message.request_id, heard)
        if isinstance(message, GenerationEvent) and message.kind in (GenerationKind.DUPLICATE, GenerationKind.REFUSED):
            self._answered(request, (message.prompt_partition, message.prompt_offset), repeat=True)
        elif request.ended is not None:
            self._after_the_end(request, message)
        else:
            self._rule(request, message, heard.offset)
        self._settle(request)

    def _rule(self, request: Request, message: Accepted | Released | GenerationEvent, offset: int) -> None:
        before = self._reader.get(message.request_id)
        finals = set() if before is None else set(before.finals)
        ruling = self._reader.apply(message, offset=offset)
        state = self._reader.get(message.request_id)
        if ruling is Ruling.VOID:
            self.counts.void += 1
            if before is not None and isinstance(message, GenerationEvent) and message.index in finals:
                self._doubled(request, message, before.holder)
        if state is None:
            return
        if ruling is Ruling.HOLDS:
            request.held.add(state.attempt)
            request.tokens.clear()
        elif isinstance(message, GenerationEvent) and ruling is Ruling.TOKENS:
            request.take_tokens(message)
        elif isinstance(message, GenerationEvent) and ruling is Ruling.CLOSED:
            request.take_final(message)
        if state.closed:
            self.counts.over += 1
            self._answered(request, (state.prompt_partition, state.prompt_offset))
            self._reader.forget(request.request_id)
            request.ended = Ended.of(state)
            request.tokens.clear()

    def _after_the_end(self, request: Request, message: Accepted | Released | GenerationEvent) -> None:
        self.counts.void += 1
        if request.ended is not None and isinstance(message, GenerationEvent):
            self._doubled(request, message, request.ended.holder)

    def _doubled(self, request: Request, message: GenerationEvent, holder: tuple[int, int]) -> None:
        if message.kind is GenerationKind.FINAL and (message.attempt, message.incarnation) == holder:
            detail = f"attempt {message.attempt} of {message.engine}: {message.outcome}"
            request.fault(FindingKind.DOUBLE_FINAL, detail, StreamName(message.attempt, message.index, ""))

    def _activation(self, heard: Heard, message: Message) -> None:
        point = heard.topic.removeprefix(self._activations)
        for fact in self._streams.take(point, heard.partition, heard.offset, message):
            if isinstance(fact, Begun | Over | DeclaredLost):
                request = self._request(fact.request_id, heard)
                self._note(request.stream(fact.name), fact, heard.at_ms)
                self._settle(request)
            elif self._whole or fact.cause != "no_open_stream":
                # In mid-log it may be a record of a stream that began before.
                self._expect_letter(heard, f"no stream takes it ({fact.cause})")

    def _note(self, note: Note, fact: Begun | Over | DeclaredLost, at_ms: int) -> None:
        if isinstance(fact, Begun):
            note.begun_ms = note.begun_ms or at_ms
            self.counts.streams += not note.opened
            note.opened, note.over = True, None
        elif isinstance(fact, Over):
            note.over = fact
        else:
            note.declared_lost = True

    def _order(self, heard: Heard, message: ControlCommand | ControlAck) -> None:
        if isinstance(message, ControlCommand) and message.kind is not CommandKind.ABORT:
            return
        request = self._request(message.request_id, heard)
        order = request.order(message.command_id)
        if isinstance(message, ControlCommand):
            order.command = order.command or message
        elif message.outcome is not AckOutcome.UNKNOWN:
            order.ack = order.ack or message

    # --- requests

    def _request(self, request_id: str, heard: Heard) -> Request:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = self._thawed(request_id)
        request.last_ms = max(request.last_ms, heard.at_ms)
        return request

    def _settle(self, request: Request) -> None:
        """Keep little of a request that is over, when nothing about it is wrong."""
        ended = request.ended
        rules = self._rules()
        if ended is None or not request.settled(rules) or any(request.findings(None, (), rules)):
            return
        words = frozenset(
            (name, service, probe, voice.ended)
            for name, note in request.streams.items()
            for (service, probe), voice in (note.voices.items() if note.voices else [(("", ""), Voice())])
        )
        done = _Done(ended.attempt, ended.incarnation, ended.n, frozenset(request.held), words)
        self._done[request.request_id] = self._kept.setdefault(done, done)
        if len({name.point for name in request.streams}) > 1 or any(not probe for _, _, probe, _ in words):
            begun_ms = min((note.begun_ms for note in request.streams.values() if note.opened), default=0)
            self._done_ms[request.request_id] = begun_ms, request.last_ms
        del self._requests[request.request_id]

    def _thawed(self, request_id: str) -> Request:
        """Return a request that nothing is known of, or one that is over and hears of something more."""
        request = Request(request_id)
        done = self._done.pop(request_id, None)
        if done is None:
            return request
        request.asked = True
        request.held = set(done.held)
        request.ended = Ended(done.attempt, done.incarnation, done.n)
        begun_ms, request.last_ms = self._done_ms.pop(request_id, (0, 0))
        for name, service, probe, kind in done.words:
            note = request.stream(name)
            note.begun_ms = begun_ms
            note.opened, note.over = True, Over(request_id, name, complete=True, conflict=False, gap="")
            if kind is not None:
                note.voices[service, probe] = Voice(kind)
        return request

    def _rules(self) -> Rules:
        return Rules(self._whole, not self.counts.prompts, self._unjudged, self._heard_ms)

    # --- what is wrong

    def findings(self, before_ms: int | None = None) -> Iterator[Finding]:
        """Yield what is wrong as far as was read, by request.

        Args:
            before_ms: a request, or a record, that was heard of after this time may still be under way and is left
                out; None judges all.
        """
        rules = self._rules()
        self._look_again(rules)
        for request_id, request in sorted(self._requests.items()):
            if before_ms is None or request.last_ms <= before_ms:
                yield from request.findings(self._reader.get(request_id), self._prompt_letters(request), rules)
        for place, (at_ms, why) in sorted(self._unplaced.items()):
            judged = place.topic == self._prompts_topic or self._point(place.topic) not in self._unjudged
            if judged and (before_ms is None or at_ms <= before_ms):
                where = f"{place.topic}[{place.partition}] offset {place.offset}: {why}"
                yield Finding("", FindingKind.NOT_DEAD_LETTERED, where)

    def _look_again(self, rules: Rules) -> None:
        """Take up requests that were over before it was read who judges their streams, alone or joined."""
        if not rules.joining:
            return
        since_ms = min(rules.heard_ms.values())
        for request_id in [name for name, (at_ms, _) in self._done_ms.items() if at_ms >= since_ms]:
            request = self._requests[request_id] = self._thawed(request_id)
            self._settle(request)

    def under_way(self, before_ms: int | None = None) -> int:
        """Return how many requests are not over yet and were heard of after a time; 0 without one."""
        return sum(
            request.ended is None and (bool(request.waiting - self._prompt_letters(request)) or not self.counts.prompts)
            for request in self._requests.values()
            if before_ms is not None and request.last_ms > before_ms
        )

    def _prompt_letters(self, request: Request) -> set[tuple[int, int]]:
        return {place for place in request.waiting if Place(self._prompts_topic, *place) in self._letters}

    def _point(self, topic: str) -> str:
        return topic.removeprefix(self._activations)
