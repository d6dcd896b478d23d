"""One request as an audit knows it: what every topic says of it, joined, and what does not go together.

The topics come in any order between them, each partition in its own: nothing is judged before somebody asks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from undercurrent.protocol.audit_findings import Finding, FindingKind
from undercurrent.protocol.audit_rules import Rules
from undercurrent.protocol.audit_streams import Over, StreamName
from undercurrent.protocol.audit_verdicts import Voice
from undercurrent.protocol.generations import RequestState
from undercurrent.protocol.messages import (
    AckOutcome,
    ControlAck,
    ControlCommand,
    GenerationEvent,
    GuardState,
    Outcome,
    ProbeVerdict,
)
from undercurrent.topics import JOIN, points_of

MOST_FAULTS = 16
"""What is kept of a request that is wrong again and again."""


@dataclass(slots=True)
class Note:
    """A stream of a request.

    Args:
        opened: its start is on record.
        declared_lost: somebody ended it though it never opened.
        over: how it closed.
        begun_ms: when the broker appended its start.
        voices: what each probe has said of it, by (service, probe).
    """

    opened: bool = False
    declared_lost: bool = False
    over: Over | None = None
    begun_ms: int = 0
    voices: dict[tuple[str, str], Voice] = field(default_factory=dict)


@dataclass(slots=True)
class Order:
    """A command that names a request.

    Args:
        command: it; None where only its answer was read.
        ack: the first answer that counts.
    """

    command: ControlCommand | None = None
    ack: ControlAck | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """What is kept of a request that has all of its finals.

    Args:
        attempt: that held it at its end.
        incarnation: of that attempt.
        n: children.
        points: extraction points of that attempt.
        finals: of each child the outcome, the command that it names, and the guards that it calls complete.
    """

    attempt: int
    incarnation: int
    n: int
    points: tuple[str, ...] = ()
    finals: Mapping[int, tuple[Outcome | None, str | None, tuple[str, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, state: RequestState) -> Ended:
        """Return what is kept of a closed request."""
        finals = {
            index: (
                final.outcome,
                final.abort.command_id if final.abort else None,
                tuple(guard.probe for guard in final.guards if guard.state is GuardState.COMPLETE),
            )
            for index, final in state.finals.items()
        }
        return cls(state.attempt, state.incarnation, state.n, state.points, finals)

    @property
    def holder(self) -> tuple[int, int]:
        """The pair (attempt, incarnation) whose finals they are."""
        return self.attempt, self.incarnation

    @property
    def plain(self) -> bool:
        """Every child ran to its own end."""
        return all(outcome is Outcome.COMPLETED for outcome, _, _ in self.finals.values())


@dataclass(slots=True)
class Request:
    """What is known of a request.

    Args:
        request_id: its id.
        asked: a prompt of it was read.
        waiting: places (partition, offset) of prompts that nothing has settled.
        held: attempts that held it.
        ended: its finals, when it has them all.
        tokens: tokens so far of each child, in the attempt that holds.
        streams: of every attempt.
        orders: commands by id.
        faults: what was found at once.
        last_ms: when the broker appended its latest record.
    """

    request_id: str
    asked: bool = False
    waiting: set[tuple[int, int]] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    ended: Ended | None = None
    tokens: dict[int, int] = field(default_factory=dict)
    streams: dict[StreamName, Note] = field(default_factory=dict)
    orders: dict[str, Order] = field(default_factory=dict)
    faults: list[Finding] = field(default_factory=list)
    last_ms: int = 0

    # --- what comes in

    def fault(self, kind: FindingKind, detail: str, name: StreamName | None = None, probe: str | None = None) -> None:
        """Note something that is wrong whatever follows."""
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(self._finding(kind, detail, name, probe))

    def stream(self, name: StreamName) -> Note:
        """Return the note of a stream."""
        return self.streams.setdefault(name, Note())

    def order(self, command_id: str) -> Order:
        """Return what is known of a command."""
        return self.orders.setdefault(command_id, Order())

    def take_tokens(self, event: GenerationEvent) -> None:
        """Count tokens of the attempt that holds."""
        known = self.tokens.get(event.index, 0)
        if event.first_token_index != known:
            where = f"attempt {event.attempt}: token {event.first_token_index} follows on {known} tokens"
            self.fault(FindingKind.TOKENS_BROKEN, where, StreamName(event.attempt, event.index, ""))
        self.tokens[event.index] = event.first_token_index + len(event.token_ids)

    def take_final(self, event: GenerationEvent) -> None:
        """Compare a valid final with the tokens before it."""
        known = self.tokens.pop(event.index, 0)
        if event.outcome is not Outcome.FAILED and event.generated_tokens != known:
            where = f"attempt {event.attempt}: {known} tokens are in the log, the final says {event.generated_tokens}"
            self.fault(FindingKind.TOKENS_BROKEN, where, StreamName(event.attempt, event.index, ""))

    def take_verdict(self, verdict: ProbeVerdict) -> None:
        """Note what a probe says of a stream."""
        name = StreamName(verdict.attempt, verdict.index, verdict.point)
        voice = self.stream(name).voices.setdefault((verdict.service, verdict.probe), Voice())
        wrong = voice.take(verdict)
        if wrong is not None:
            self.fault(FindingKind.DOUBLE_VERDICT, wrong, name, verdict.probe)

    # --- what follows from it

    def settled(self, rules: Rules) -> bool:
        """Return whether all has come that can be expected: only then is it worth looking for what is wrong."""
        ended = self.ended
        if ended is None or not self.asked or self.waiting or self.orders or not ended.plain:
            return False
        expected = {StreamName(ended.attempt, i, point) for i in ended.finals for point in ended.points}
        return (
            expected <= self.streams.keys()
            and self._joined(rules) <= self.streams.keys()
            and all(self._has_its_last_word(name, note, rules) for name, note in self.streams.items())
        )

    def _has_its_last_word(self, name: StreamName, note: Note, rules: Rules) -> bool:
        if note.declared_lost or (note.voices and _all_ended(note) and (note.over or JOIN in name.point)):
            return True
        return note.over is not None and not note.voices and not rules.judges(name.point, note.begun_ms)

    def findings(
        self, state: RequestState | None, letters: Collection[tuple[int, int]], rules: Rules
    ) -> Iterator[Finding]:
        """Yield what is wrong with it as far as was read.

        Args:
            state: what the reader rule knows of it while it is open.
            letters: places of prompts that are dead-lettered.
            rules: how it is judged.
        """
        yield from self.faults
        if not (self.asked or rules.bare):
            return  # it began before what was read: nobody can tell what is missing
        yield from self._prompts(state, letters)
        yield from self._orders()
        for name, note in sorted(self.streams.items()):
            yield from self._stream(name, note, rules)
        for name in sorted(self._joined(rules) - self.streams.keys()):
            yield self._finding(FindingKind.NO_VERDICT, "no probe has said anything of what it joins", name)
        yield from self._claims(state)
        if self.ended is not None:
            yield from self._streams_missing(self.ended)
            yield from self._guards(self.ended)

    def _prompts(self, state: RequestState | None, letters: Collection[tuple[int, int]]) -> Iterator[Finding]:
        open_child = (
            f", child {state.open_children[0]}" if state is not None and state.n > 1 and not state.closed else ""
        )
        first = True
        for place in sorted(self.waiting):
            claimed = state is not None and (state.prompt_partition, state.prompt_offset) == place
            if place in letters and not claimed:
                continue  # it names no request of its partition: a dead letter is all that it gets
            said = f"the prompt at partition {place[0]} offset {place[1]}"
            if self.ended is None and first:
                yield self._finding(FindingKind.NO_FINAL, f"{said}: {_where(state)}{open_child}")
                first = False
            else:
                yield self._finding(FindingKind.PROMPT_UNANSWERED, f"{said} is neither run nor answered")

    def _orders(self) -> Iterator[Finding]:
        ended = self.ended
        if ended is None:
            return
        named = {command_id for _, command_id, _ in ended.finals.values() if command_id}
        for command_id in sorted(named):
            order = self.orders.get(command_id)
            if order is None or order.command is None:
                detail = f"the final names command {command_id}, which is not on the control topic"
                yield self._finding(FindingKind.ABORT_UNFOUNDED, detail)
        for command_id, order in sorted(self.orders.items()):
            if order.command is None:
                continue
            if order.ack is None:
                yield self._finding(FindingKind.COMMAND_UNANSWERED, f"command {command_id} has no answer")
            elif (wrong := _contradiction(ended, order.command, order.ack)) is not None:
                yield self._finding(FindingKind.ACK_CONTRADICTED, f"command {command_id}: {wrong}")

    def _joined(self, rules: Rules) -> set[StreamName]:
        """Return what is joined of its streams, where they are over and a probe that joins them was there before."""
        found = set[StreamName]()
        for point, heard_ms in rules.joining.items():
            for attempt, child in {(name.attempt, name.child) for name in self.streams}:
                name = StreamName(attempt, child, point)
                notes = self._parts(name)
                begun_ms = [note.begun_ms for note in notes if note is not None and note.opened]
                if begun_ms and min(begun_ms) >= heard_ms and all(map(_is_over, notes)):
                    found.add(name)
        return found

    def _parts(self, name: StreamName) -> list[Note | None]:
        return [self.streams.get(name._replace(point=point)) for point in points_of(name.point)]

    def _of_several(self, name: StreamName, note: Note, rules: Rules) -> Iterator[Finding]:
        notes = self._parts(name)
        if rules.whole and not any(part is not None and part.opened for part in notes):
            yield self._finding(FindingKind.VERDICT_UNFOUNDED, "no start of what it joins is in the log", name)
        if name.point in rules.unjudged or not all(map(_is_over, notes)):
            return
        whole = all(part is not None and part.over is not None and part.over.complete for part in notes)
        yield from self._last_words(name, note, complete=whole)

    def _stream(self, name: StreamName, note: Note, rules: Rules) -> Iterator[Finding]:
        if JOIN in name.point:
            yield from self._of_several(name, note, rules)
            return
        if not note.opened:
            if note.voices and rules.whole:
                yield self._finding(FindingKind.VERDICT_UNFOUNDED, "its start is not in the log", name)
            return
        over = note.over
        if over is None:
            if self.ended is not None:
                yield self._finding(FindingKind.STREAM_OPEN, "the request is over, the stream has no end", name)
            return
        if over.gap:
            yield self._finding(FindingKind.UNDECLARED_GAP, over.gap, name)
        if over.conflict:
            yield self._finding(FindingKind.STREAM_CONFLICT, "two live engines wrote it", name)
        if name.point in rules.unjudged:
            return
        if not note.voices and rules.judges(name.point, note.begun_ms):
            yield self._finding(FindingKind.NO_VERDICT, "no probe has said anything of it", name)
        yield from self._last_words(name, note, complete=over.complete)

    def _last_words(self, name: StreamName, note: Note, *, complete: bool) -> Iterator[Finding]:
        for (service, probe), voice in sorted(note.voices.items()):
            if not voice.ended:
                yield self._finding(FindingKind.NO_VERDICT, f"{service} has begun and not ended it", name, probe)
            elif voice.complete and not complete:
                detail = f"{service} says complete, and the stream is not whole"
                yield self._finding(FindingKind.FALSE_COMPLETE, detail, name, probe)

    def _claims(self, state: RequestState | None) -> Iterator[Finding]:
        if not self.held and state is None and self.ended is None:
            return  # of a server that claims nothing
        for attempt in sorted({name.attempt for name, note in self.streams.items() if note.opened} - self.held):
            yield self._finding(FindingKind.RAN_UNCLAIMED, f"attempt {attempt} has streams and never held the request")

    def _streams_missing(self, ended: Ended) -> Iterator[Finding]:
        for index, (outcome, _, _) in sorted(ended.finals.items()):
            for point in ended.points if outcome is Outcome.COMPLETED else ():
                name = StreamName(ended.attempt, index, point)
                note = self.streams.get(name)
                if note is None or not (note.opened or note.declared_lost):
                    yield self._finding(FindingKind.STREAM_MISSING, "the request was completed without it", name)

    def _guards(self, ended: Ended) -> Iterator[Finding]:
        for index, (_, _, guards) in sorted(ended.finals.items()):
            whole = {
                probe
                for name, note in self.streams.items()
                if (name.attempt, name.child) == (ended.attempt, index)
                for (_, probe), voice in note.voices.items()
                if voice.whole
            }
            for probe in sorted(set(guards) - whole):
                name = StreamName(ended.attempt, index, "")
                detail = "the final calls it complete, and it has no result on the whole stream"
                yield self._finding(FindingKind.GUARD_UNFOUNDED, detail, name, probe)

    def _finding(
        self, kind: FindingKind, detail: str, name: StreamName | None = None, probe: str | None = None
    ) -> Finding:
        if name is None:
            return Finding(self.request_id, kind, detail, probe=probe)
        return Finding(self.request_id, kind, detail, name.attempt, name.child, name.point or None, probe)


def _is_over(note: Note | None) -> bool:
    return note is not None and (note.over is not None or note.declared_lost)


def _all_ended(note: Note) -> bool:
    return all(voice.ended for voice in note.voices.values())


def _where(state: RequestState | None) -> str:
    """Return how far a request without a final is, in words."""
    if state is None:
        return "no engine worker has accepted it"
    held = f"attempt {state.attempt} of {state.engine}"
    return (
        f"{held} gave it up, and nobody has taken it since" if state.released else f"{held} holds it, without a final"
    )


def _contradiction(ended: Ended, command: ControlCommand, ack: ControlAck) -> str | None:
    """Return what of the finals is not as an answer promised."""
    # Of a request with one child, a command for child 0 is one for the request.
    index = None if ended.n == 1 and command.index == 0 else command.index
    children = {i: named for i, (outcome, named, _) in ended.finals.items() if outcome is Outcome.ABORTED}
    meant = {i: named for i, named in children.items() if index in (None, i)}
    names_it = command.command_id in children.values()
    match ack.outcome:
        case AckOutcome.APPLIED:
            return None if command.command_id in meant.values() else "applied, and no final names it"
        case AckOutcome.TOO_LATE:
            return "too late, and the final is aborted" if meant else None
        case AckOutcome.ALREADY:
            return None if meant and not names_it else "already, and no final names another command"
        case _:
            return f"{ack.outcome}, and a final names it" if names_it else None
