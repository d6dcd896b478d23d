"""The logs of a world of engine workers, and a plain oracle on them, written from the rule and not from the code."""

from __future__ import annotations

from collections import defaultdict

from undercurrent.protocol.epochs import decode_metadata
from undercurrent.protocol.messages import (
    Accepted,
    AckOutcome,
    ControlAck,
    ControlCommand,
    GenerationEvent,
    GenerationKind,
    Outcome,
    Released,
)
from undercurrent.protocol.worker_types import (
    Commit,
    Defect,
    Prompt,
    RunKey,
)
from undercurrent.topics import partition_of

PARTITIONS = 2


class Logs:
    """What is on the topics, and what must hold of it."""

    def __init__(self) -> None:
        self.prompts: dict[int, list[Prompt | Defect]] = {p: [] for p in range(PARTITIONS)}
        self.log: dict[int, list[Accepted | Released | GenerationEvent]] = {p: [] for p in range(PARTITIONS)}
        self.control: list[ControlCommand] = []
        self.acks: list[ControlAck] = []
        self.dead_letters: set[tuple[int, int]] = set()
        self.premature: set[str] = set()

    def valid_finals(self, partition: int, upto: int | None = None) -> dict[tuple[str, int], GenerationEvent]:
        holder: dict[str, tuple[int, int]] = {}
        released: set[tuple[str, int, int]] = set()
        children: dict[str, int] = {}
        finals: dict[tuple[str, int], GenerationEvent] = {}
        for message in self.log[partition][:upto]:
            request = message.request_id
            pair = (message.attempt, message.incarnation)
            over = request in children and all((request, i) in finals for i in range(children[request]))
            if isinstance(message, Accepted):
                if not over and message.attempt > holder.get(request, (0, 0))[0]:
                    holder[request] = pair
                    children[request] = message.n
            elif isinstance(message, Released):
                released.add((request, *pair))
            elif message.kind is GenerationKind.FINAL and holder.get(request) == pair:
                taken = (request, *pair) in released or (request, message.index) in finals
                finals.update({} if taken else {(request, message.index): message})
        return finals

    def deaths(self, partition: int, request: str, attempt: int, incarnation: int) -> int:
        """Return how many others took a request before a claim of it and said no last word until then."""
        highest, taken = 0, set[tuple[int, int]]()
        for message in self.log[partition]:
            pair = (message.attempt, message.incarnation)
            if message.request_id != request:
                continue
            if isinstance(message, Accepted) and pair == (attempt, incarnation):
                break
            if isinstance(message, Accepted):
                taken |= {pair} if message.attempt > highest else set()
                highest = max(highest, message.attempt)
            elif isinstance(message, Released) or message.kind is GenerationKind.FINAL:
                taken.discard(pair)
        return sum(other != incarnation for _, other in taken)

    def is_over(self, partition: int, offset: int) -> bool:
        prompt = self.prompts[partition][offset]
        if isinstance(prompt, Defect):
            return (partition, offset) in self.dead_letters
        finals = self.valid_finals(partition)
        if all((prompt.request_id, i) in finals for i in range(prompt.n)):
            return True
        return any(
            isinstance(m, GenerationEvent)
            and m.prompt_offset == offset
            and m.kind in (GenerationKind.DUPLICATE, GenerationKind.REFUSED)
            for m in self.log[partition]
        )

    def check_commit(self, commit: Commit) -> None:
        position = decode_metadata(commit.offset, commit.metadata)
        for offset in [*range(commit.offset), *position.finished]:
            assert self.is_over(commit.partition, offset), f"{commit} passes unfinished prompt {offset}"

    def check_start(self, incarnation: int, key: RunKey) -> None:
        partition = partition_of(key.request_id, PARTITIONS)
        at = next(
            i
            for i, m in enumerate(self.log[partition])
            if isinstance(m, Accepted) and (m.request_id, m.attempt, m.incarnation) == (*key, incarnation)
        )
        before = {request for request, _ in self.valid_finals(partition, at)}
        prompt = next(p for p in self.prompts[partition] if isinstance(p, Prompt) and p.request_id == key.request_id)
        finished = [(key.request_id, i) in self.valid_finals(partition, at) for i in range(prompt.n)]
        assert not all(finished), f"{key} is run though it was finished: {before}"
        assert self.deaths(partition, *key, incarnation) <= 2, f"{key} runs though three have died of it"

    def check_end(self) -> None:
        """Every prompt has ended, once, and as it should; nobody was promised what did not come."""
        named = {command.command_id: command for command in self.control}
        outcomes: dict[str, set[Outcome | None]] = defaultdict(set)
        children: dict[tuple[str, int], Outcome | None] = {}
        for partition, prompts in self.prompts.items():
            finals = self.valid_finals(partition)
            for (request, index), final in finals.items():
                outcomes[request].add(final.outcome)
                children[request, index] = final.outcome
                if final.outcome is Outcome.ABORTED:
                    assert final.abort is not None
                    assert named[final.abort.command_id].index in (None, index), "a child that nobody meant was stopped"
            for offset, prompt in enumerate(prompts):
                assert self.is_over(partition, offset), f"prompt {offset} of {partition} never ended"
                if isinstance(prompt, Prompt):
                    self._check_loss(partition, prompt, finals)
                    first = next(p for p in prompts if isinstance(p, Prompt) and p.request_id == prompt.request_id)
                    assert sum(request == prompt.request_id for request, _ in finals) == first.n
                    fails = prompt.request_id.startswith(("bad", "poison")) or prompt.defect
                    expected = {Outcome.FAILED} if fails else None
                    assert expected is None or outcomes[prompt.request_id] <= {*expected, Outcome.ABORTED}
        self._check_acks(outcomes, children)

    def _check_loss(self, partition: int, prompt: Prompt, finals: dict[tuple[str, int], GenerationEvent]) -> None:
        """A request is given up only when three have died of it, and its prompt is a dead letter then."""
        for (request, _), final in finals.items():
            if request == prompt.request_id and final.finish_reason == "engine_lost":
                deaths = self.deaths(partition, request, final.attempt, final.incarnation)
                assert deaths >= 3, f"{final} is lost though it is innocent"
                assert (partition, final.prompt_offset) in self.dead_letters

    def _check_acks(
        self, outcomes: dict[str, set[Outcome | None]], children: dict[tuple[str, int], Outcome | None]
    ) -> None:
        first_acks: dict[str, ControlAck] = {}
        for ack in self.acks:
            if ack.outcome is AckOutcome.UNKNOWN:
                assert ack.command_id in self.premature, f"{ack}: its prompt was there before the command"
            else:
                first_acks.setdefault(ack.command_id, ack)
        for command in self.control:
            if command.request_id not in outcomes:
                continue
            if command.attempt is None:
                assert command.command_id in first_acks, f"{command} was never answered"
            first = first_acks.get(command.command_id)
            ended = outcomes[command.request_id]
            if command.index is not None:
                ended = {children[key] for key in [(command.request_id, command.index)] if key in children}
            if first is not None and first.outcome is AckOutcome.APPLIED:
                assert Outcome.ABORTED in ended, (first, ended)
            if first is not None and first.outcome is AckOutcome.TOO_LATE:
                assert ended
                assert Outcome.ABORTED not in ended, (first, ended)
