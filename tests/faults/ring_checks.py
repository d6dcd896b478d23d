"""Compares everything that the topics say with what follows from the seed, by ids."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.faults.ring_prompts import JUDGES, Asked
from undercurrent.evaluation.diff import Telling, collect
from undercurrent.kafka.records import Record
from undercurrent.protocol.messages import (
    AckOutcome,
    ActivationBlock,
    ControlAck,
    ControlCommand,
    EndReason,
    GenerationEvent,
    Outcome,
    ProbeVerdict,
    StreamEnded,
    StreamStarted,
    VerdictKind,
)
from undercurrent.testing.fake_engine import generated_text

if TYPE_CHECKING:
    from tests.faults.ring_world import RingWorld

Place = tuple[str, int, int]
"""Topic, partition, offset."""


def header_of(letter: Record, name: str) -> str:
    """Return what a dead letter says of itself."""
    return next(value for key, value in letter.headers or () if key == f"undercurrent.{name}").decode()


def place_of(letter: Record) -> Place:
    """Return where the record of a dead letter lies."""
    return header_of(letter, "topic"), int(header_of(letter, "partition")), int(header_of(letter, "offset"))


class Allowed(NamedTuple):
    """What a world's faults may cost; see `RingWorld.check`."""

    lossless: bool
    may_die: bool
    may_lose_streams: bool


class Checks:
    """One look at all topics, and every comparison."""

    def __init__(self, world: RingWorld, allowed: Allowed) -> None:
        self._world = world
        self._lossless = allowed.lossless
        self._may_die = allowed.may_die
        self._may_lose_streams = allowed.may_lose_streams
        bench = world.bench
        self._finals = bench.finals()
        self._texts = bench.texts()
        self._claims = bench.starts()
        self._acks = bench.acks()
        self._verdicts = world.verdicts()
        self._told = collect(self._verdicts)
        self._letters = world.letters()
        self._streams = world.streamed({place_of(letter) for letter in self._letters})
        self._commands = {
            m.command_id: m for _, m in bench.messages(bench.plan.control) if isinstance(m, ControlCommand)
        }
        self._wrong: list[str] = []

    def run(self) -> list[str]:
        """Return what is wrong, in words."""
        for request_id in self._finals.keys() - self._world.asked.keys():
            if not self._is_poison(request_id):
                self._say(request_id, "has a final and was never asked for")
        for asked in self._world.asked.values():
            finals = self._finals.get(asked.request_id, [])
            if len(finals) != 1:
                self._say(asked.request_id, f"has {len(finals)} finals that count")
                continue
            self._final(asked, finals[0])
        for finding in self._world.bench.audit():
            self._say(finding.request_id, f"audit: {finding}")
        self._words()
        self._aborts()
        self._dead()
        figures = self._world.figures
        figures["requests"] = len(self._world.asked)
        figures["attempts"] = sum(map(len, self._claims.values()))
        figures["streams"] = sum(isinstance(m, StreamStarted) for _, m in self._streams)
        figures["rows"] = sum(len(m.positions) // 4 for _, m in self._streams if isinstance(m, ActivationBlock))
        figures["verdicts"] = len(self._verdicts)
        figures["aborts"] = len(self._commands)
        figures["dead_letters"] = len(self._letters)
        return self._wrong

    def _say(self, request_id: str, what: str) -> None:
        self._wrong.append(f"{request_id}: {what}")

    def _is_poison(self, request_id: str) -> bool:
        return request_id.startswith("poison")

    # Requests.

    def _final(self, asked: Asked, final: GenerationEvent) -> None:
        name, text = asked.request_id, self._texts.get(asked.request_id, "")
        whole = generated_text(name, asked.tokens)
        self._world.figures[str(final.outcome)] += 1
        match final.outcome:
            case Outcome.COMPLETED if (text, final.generated_tokens) != (whole, asked.tokens):
                self._say(name, f"completed with {text!r}, {final.generated_tokens} tokens")
            case Outcome.ABORTED if asked.acts_at("guard") is None:
                self._say(name, "was aborted, and its guard never acts on it")
            case Outcome.ABORTED if not whole.startswith(text) or len(text) != final.generated_tokens:
                self._say(name, f"was aborted with {text!r}, {final.generated_tokens} tokens")
            case Outcome.FAILED:
                self._failed(asked, final)
                return
        for judge in JUDGES:
            self._judged(asked, final, judge)

    def _failed(self, asked: Asked, final: GenerationEvent) -> None:
        """An innocent that was under way in three engines that died is lost, and that is declared."""
        declared = any(letter.key == asked.request_id.encode() for letter in self._letters)
        claims = len(self._claims.get(asked.request_id, ()))
        if not self._may_die or final.finish_reason != "engine_lost" or claims < 3 or not declared:
            self._say(asked.request_id, f"failed: {final.finish_reason} {final.error}, {claims} claims, {declared=}")

    # Verdicts.

    def _judged(self, asked: Asked, final: GenerationEvent, judge: str) -> None:
        name = f"{asked.request_id}#{final.attempt} by {judge}"
        telling = next((t for k, t in self._told.items() if self._names(k, final, judge)), None)
        if telling is None or len(telling.last_words) != 1:
            return  # told of by `_words`
        word, found = telling.last_words[0], self._scores(telling, judge)
        if word.kind is not VerdictKind.RESULT:
            self._say(name, f"ended with {word.kind}: {word.error}")
        elif self._may_lose_streams and word.end_reason == EndReason.LOST.value:
            self._world.figures["streams_lost"] += judge == "watch"
            if word.complete or len(found) != word.scored:
                self._say(name, f"of a lost stream, complete={word.complete}, {len(found)} scores of {word.scored}")
        elif final.outcome is Outcome.COMPLETED and self._lossless:
            whole = (word.complete, word.missing, word.scored, word.end_reason)
            if whole != (True, 0, asked.rows, EndReason.FINISHED.value) or len(found) != asked.rows:
                self._say(name, f"is not whole: {whole}, {len(found)} scores of {asked.rows}")
        elif final.outcome is Outcome.COMPLETED:
            self._declared(asked, final, judge, word, len(found))
        elif sorted(found) != list(range(len(found))) and self._lossless:
            self._say(name, "has holes")
        scores, threshold = asked.scores[judge], JUDGES[judge].threshold
        acts_at = next((at for at in sorted(found) if float(scores[at]) >= threshold), None)
        if word.token_pos != acts_at:
            self._say(name, f"acted at {word.token_pos}, not at {acts_at}")

    def _declared(self, asked: Asked, final: GenerationEvent, judge: str, word: ProbeVerdict, found: int) -> None:
        """What a judge did not see is declared by the stream's end, and its result says that it is not whole."""
        name = f"{asked.request_id}#{final.attempt} by {judge}"
        ends = [m for _, m in self._streams if isinstance(m, StreamEnded) and _of(m, final)]
        if len(ends) != 1:
            self._say(name, f"has {len(ends)} ends")
            return
        (end,) = ends
        self._world.figures["rows_dropped"] += sum(set(end.dropped)) if judge == "watch" else 0
        if {e + d for e, d in zip(end.emitted, end.dropped, strict=True)} != {asked.rows}:
            self._say(name, f"computed {asked.rows} rows, its end declares {end.emitted} and {end.dropped} dropped")
        if {found} != set(end.emitted) or word.scored != found:
            self._say(name, f"{found} scores ({word.scored} said) of {end.emitted} rows emitted")
        if word.complete != (not any(end.dropped)) or (word.missing > 0) != any(end.dropped):
            self._say(name, f"complete={word.complete}, missing={word.missing}, dropped {end.dropped}")

    @staticmethod
    def _names(key: Any, final: GenerationEvent, judge: str) -> bool:
        return (key.request_id, key.attempt, key.probe) == (final.request_id, final.attempt, judge)

    @staticmethod
    def _scores(telling: Telling, judge: str) -> dict[int, int]:
        return {at: bits for (at, layer), bits in telling.scores.items() if layer == JUDGES[judge].layer}

    def _words(self) -> None:
        """Every stream, of any attempt, gets one last word of each judge; no score is another or comes twice."""
        streams = Counter((m.request_id, m.attempt) for _, m in self._streams if isinstance(m, StreamStarted))
        told: dict[tuple[str, int], set[str]] = defaultdict(set)
        for key, telling in self._told.items():
            name = f"{key.request_id}#{key.attempt} by {key.probe}"
            told[key.request_id, key.attempt].add(key.probe)
            if len(telling.last_words) != 1:
                self._say(name, f"has {len(telling.last_words)} last words")
            if telling.doubled:
                self._say(name, f"has {telling.doubled} scores twice")
            if (key.request_id, key.attempt) not in streams:
                self._say(name, "was judged and has no stream")
            asked = self._world.asked.get(key.request_id)
            if asked is not None:
                expected = asked.scores[key.probe]
                found = self._scores(telling, key.probe)
                if any(at >= len(expected) or bits != int(expected[at].view(np.uint32)) for at, bits in found.items()):
                    self._say(name, "has a score that no row of it has")
        for stream in streams:
            if missing := JUDGES.keys() - told[stream]:
                self._say(f"{stream[0]}#{stream[1]}", f"was never judged by {sorted(missing)}")
        signals = Counter((v.request_id, v.attempt, v.probe) for v in self._verdicts if v.kind is VerdictKind.SIGNAL)
        for (request_id, attempt, judge), count in signals.items():
            if count > 1:
                self._say(f"{request_id}#{attempt} by {judge}", f"acts {count} times")

    # Aborts.

    def _aborts(self) -> None:
        """Each abort stands for one signal, is answered, and `applied` is a promise about the final."""
        decided = {v.command_id: v for v in self._verdicts if v.command_id is not None}
        # Sent once, decided anew after a long outage: by then the record is too old to abort for.
        too_old = {(v.request_id, v.attempt) for v in self._verdicts if v.metadata.get("abort") == "too_old"}
        for command_id, command in self._commands.items():
            if command_id not in decided and (command.request_id, command.attempt) not in too_old:
                self._say(command.request_id, f"abort {command_id} was sent and no verdict names it")
            answers: Sequence[ControlAck] = self._acks.get(command_id, ())
            counting = next((ack for ack in answers if ack.outcome is not AckOutcome.UNKNOWN), None)
            if counting is None:
                self._say(command.request_id, f"abort {command_id} has no answer")
            elif counting.outcome is AckOutcome.APPLIED:
                outcomes = [final.outcome for final in self._finals.get(command.request_id, ())]
                if outcomes != [Outcome.ABORTED]:
                    self._say(command.request_id, f"abort applied, and it ended as {outcomes}")
        for command_id, verdict in decided.items():
            if command_id not in self._commands:
                self._say(verdict.request_id, f"a verdict names abort {command_id}, which was never sent")

    # Dead letters.

    def _dead(self) -> None:
        """Every poison record lies there once, as it came; of what counts nothing does."""
        holders = {(name, final.attempt) for name, finals in self._finals.items() for final in finals}
        left = Counter({place: 1 for place in self._world.poison})
        for letter in self._letters:
            place, cause = place_of(letter), header_of(letter, "cause")
            self._world.figures[f"dead_{cause}"] += 1
            left[place] -= 1
            if place in self._world.poison:
                if letter.value != self._world.poison[place]:
                    self._say(str(place), "lies in the dead letters with other bytes")
                continue
            if left[place] < -1:
                self._say(str(place), "lies in the dead letters twice")
            message = self._world.bench.codec.decode(letter.value) if letter.value else None
            if (getattr(message, "request_id", ""), getattr(message, "attempt", 0)) in holders:
                self._say(str(place), f"a record that counts is a dead letter: {cause}")
        for place, count in left.items():
            if place in self._world.poison and count:
                self._say(str(place), f"is poison and has {1 - count} dead letters")


def _of(message: StreamEnded, final: GenerationEvent) -> bool:
    return (message.request_id, message.attempt) == (final.request_id, final.attempt)
