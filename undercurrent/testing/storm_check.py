"""What must be on the topics after a storm, found by a plain loop over them and the driver's own list.

Nothing here uses the code that is under test: who holds a request, and which final counts, is written down once more
from the rule, as somebody would who has only read it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from undercurrent.protocol.messages import (
    Accepted,
    AckOutcome,
    ControlAck,
    GenerationEvent,
    GenerationKind,
    Message,
    Outcome,
    Released,
)
from undercurrent.testing.fake_engine import generated_text

ENOUGH_DEATHS = 3
"""A request may be given up when so many engines have died with it."""


class Kind(StrEnum):
    """What the driver asked for."""

    PLAIN = "plain"
    ABORTED = "aborted"
    LATE = "late"
    BAD = "bad"


_OUTCOMES = {
    Kind.PLAIN: {Outcome.COMPLETED},
    Kind.ABORTED: {Outcome.COMPLETED, Outcome.ABORTED},
    Kind.LATE: {Outcome.FAILED},
    Kind.BAD: {Outcome.FAILED},
}
_REASONS = {Kind.LATE: "deadline", Kind.BAD: "bad_request"}


@dataclass(slots=True, kw_only=True)
class Sent:
    """A request on the driver's list.

    Args:
        request_id: its id.
        kind: what was asked for.
        tokens: to generate.
        n: children.
        command: id of the command that stops it.
        repeats: offsets of its further prompts, and what each must be answered with.
    """

    request_id: str
    kind: Kind
    tokens: int
    n: int = 1
    command: str | None = None
    repeats: dict[int, GenerationKind] = field(default_factory=dict)


@dataclass(slots=True)
class Story:
    """What the log says of one request.

    Args:
        highest: highest attempt.
        holder: the pair (attempt, incarnation) that counts.
        unexplained: pairs that took it and said no last word.
        released: the holder gave it up.
        finals: the valid final of each child.
        deaths: how many others had died of it when the valid attempt was claimed, as far as its claimant could know.
        thawed: how many had, before one of them turned out to live, since the last claim.
        texts: what each child has generated in the attempt that counts.
        claims: attempts that held it.
        answers: by offset of a further prompt, what it was answered with.
    """

    highest: int = 0
    holder: tuple[int, int] = (0, 0)
    unexplained: set[tuple[int, int]] = field(default_factory=set)
    released: bool = False
    finals: dict[int, GenerationEvent] = field(default_factory=dict)
    deaths: int = 0
    thawed: int = 0
    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    claims: list[tuple[int, int]] = field(default_factory=list)
    answers: dict[int, GenerationKind] = field(default_factory=dict)


def stories(generations: Iterable[Message], children: Mapping[str, int], counts: Counter[str]) -> dict[str, Story]:
    """Read the generations topic, each partition in its order.

    Args:
        generations: its messages.
        children: of each request.
        counts: gets what was void, and how often requests were begun anew.
    """
    found: defaultdict[str, Story] = defaultdict(Story)
    for message in generations:
        if isinstance(message, Accepted | Released | GenerationEvent):
            _read(found[message.request_id], message, children.get(message.request_id, 1), counts)
    return dict(found)


def _read(story: Story, message: Accepted | Released | GenerationEvent, n: int, counts: Counter[str]) -> None:
    pair = (message.attempt, message.incarnation)
    over = len(story.finals) >= n
    if isinstance(message, Accepted):
        if over or message.attempt <= story.highest:
            counts["void claims"] += 1
            return
        if story.claims:
            counts["begun anew after a release" if not story.unexplained else "begun anew after a loss"] += 1
        story.deaths = max(story.thawed, sum(other != message.incarnation for _, other in story.unexplained))
        story.thawed = 0
        story.highest, story.holder, story.released = message.attempt, pair, False
        story.unexplained.add(pair)
        story.claims.append(pair)
        story.texts.clear()
    elif isinstance(message, Released):
        if pair in story.unexplained and pair != story.holder:
            # It thaws: whoever claims now may have decided so before this was said.
            story.thawed = len(story.unexplained)
        story.unexplained.discard(pair)
        story.released |= pair == story.holder
    elif message.kind in (GenerationKind.DUPLICATE, GenerationKind.REFUSED):
        story.answers[message.prompt_offset] = message.kind
    elif pair != story.holder or story.released or message.index in story.finals:
        counts["void finals" if message.kind is GenerationKind.FINAL else "void tokens"] += 1
        if message.kind is GenerationKind.FINAL and pair != story.holder:
            story.unexplained.discard(pair)
    elif message.kind is GenerationKind.TOKENS:
        story.texts[message.index] += message.text
    else:
        story.finals[message.index] = message


def problems(
    sent: Sequence[Sent],
    found: Mapping[str, Story],
    acks: Iterable[Message],
    started: Iterable[tuple[str, int]],
    dead: Mapping[str, str],
) -> Iterator[str]:
    """Yield everything that is not as it was promised.

    Args:
        sent: the driver's list.
        found: see `stories`.
        acks: messages of the topic of acknowledgements, in order.
        started: request and attempt of each stream that an engine has opened.
        dead: cause of each dead letter of a prompt, by its key.
    """
    first: dict[str, ControlAck] = {}
    for ack in acks:
        if isinstance(ack, ControlAck) and ack.outcome is not AckOutcome.UNKNOWN:
            first.setdefault(ack.command_id, ack)
    for request in sent:
        story = found.get(request.request_id, Story())
        for wrong in _wrong(request, story, first, dead):
            yield f"{request}: {wrong}; {story}"
    for request_id, attempt in started:
        story = found.get(request_id, Story())
        if attempt not in {claimed for claimed, _ in story.claims}:
            yield f"{request_id}: attempt {attempt} ran and never held the request; {story}"


def _wrong(request: Sent, story: Story, first: Mapping[str, ControlAck], dead: Mapping[str, str]) -> Iterator[str]:
    if sorted(story.finals) != list(range(request.n)):
        yield f"finals of {sorted(story.finals)}, not of {request.n} children"
    for index, final in story.finals.items():
        text = generated_text(request.request_id, request.tokens, index=index)
        said = story.texts[index]
        whole = final.outcome is Outcome.COMPLETED
        if said != text[: final.generated_tokens] or (whole and said != text):
            yield f"child {index} has the text {said!r}"
    yield from _wrong_end(request, story, dead.get(request.request_id))
    if request.command is not None:
        yield from _wrong_answer(first.get(request.command), story)
    for offset, kind in request.repeats.items():
        if story.answers.get(offset) is not kind:
            yield f"its further prompt at {offset} was answered with {story.answers.get(offset)}, not {kind}"


def _wrong_end(request: Sent, story: Story, letter: str | None) -> Iterator[str]:
    outcomes = {final.outcome for final in story.finals.values()}
    reasons = {final.finish_reason for final in story.finals.values()}
    if "engine_lost" in reasons:
        if story.deaths < ENOUGH_DEATHS or letter != "engine_lost":
            yield f"it was given up after {story.deaths} deaths, with the dead letter {letter}"
        return
    if not outcomes <= _OUTCOMES[request.kind]:
        yield f"it ended as {outcomes}"
    reason = _REASONS.get(request.kind)
    if reason is not None and reasons != {reason}:
        yield f"it failed for {reasons}, not for {reason}"
    if request.kind is Kind.BAD and letter is None:
        yield "no dead letter"


def _wrong_answer(ack: ControlAck | None, story: Story) -> Iterator[str]:
    outcomes = {final.outcome for final in story.finals.values()}
    if ack is None:
        yield "its command was not answered"
    elif ack.outcome is AckOutcome.APPLIED and Outcome.ABORTED not in outcomes:
        yield "its command was answered as applied"
    elif ack.outcome is AckOutcome.TOO_LATE and Outcome.ABORTED in outcomes:
        yield "its command was answered as too late"
