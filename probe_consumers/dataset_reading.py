"""What an export learns from the topics beside the activations: prompts, finals, scores, labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from undercurrent.codec import Codec
from undercurrent.errors import DecodeError, ProtocolError
from undercurrent.evaluation.dataset_facts import FactStore, PromptFacts
from undercurrent.evaluation.dataset_split import SplitRule, group_hash
from undercurrent.kafka.records import Record
from undercurrent.protocol.generations import GenerationsReader, Ruling
from undercurrent.protocol.labels import label_key_parts
from undercurrent.protocol.messages import (
    Accepted,
    GenerationEvent,
    Label,
    Message,
    ProbeVerdict,
    PromptRequest,
    Released,
)


class Reading:
    """Reads topics into a store of facts.

    Args:
        codec: decodes messages.
        facts: where to.

    Attributes:
        undecodable: records that could not be read, by topic.
    """

    def __init__(self, codec: Codec, facts: FactStore) -> None:
        self._codec = codec
        self._facts = facts
        self.undecodable: defaultdict[str, int] = defaultdict(int)

    def prompts(self, records: Iterable[Record], rule: SplitRule) -> None:
        """Take prompts, and when each group had one."""
        for message in self._messages(records):
            if isinstance(message, PromptRequest):
                known = PromptFacts(message.prompt, message.metadata, message.tenant, message.created_at_us)
                named = group_of(message.request_id, known, rule)
                self._facts.add_prompt(message, group_hash(message.request_id if named is None else named))

    def generations(self, records: Iterable[Record]) -> None:
        """Take the valid final of each request, and the text that its attempt generated."""
        reader = GenerationsReader()
        texts: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        for offset, message in self._placed(records):
            if not isinstance(message, Accepted | Released | GenerationEvent):
                continue
            name = message.request_id
            # What is closed was forgotten, to bound memory; an Accepted after that is void.
            if reader.get(name) is None and self._facts.is_closed(name):
                continue
            ruling = reader.apply(message, offset=offset)
            if ruling is Ruling.HOLDS:
                for key in [key for key in texts if key[0] == name]:
                    del texts[key]
            elif isinstance(message, GenerationEvent) and ruling in (Ruling.TOKENS, Ruling.CLOSED):
                pieces = texts[name, message.index]
                pieces.append(message.text)
                if ruling is Ruling.CLOSED:
                    self._facts.add_final(message, "".join(texts.pop((name, message.index))))
                    if reader.is_closed(name):
                        reader.forget(name)

    def scores(self, records: Iterable[Record], points: frozenset[str]) -> None:
        """Take the scores that live probes gave at some points."""
        for message in self._messages(records):
            if isinstance(message, ProbeVerdict) and message.point in points:
                self._facts.add_scores(message)

    def labels(self, records: Iterable[Record]) -> None:
        """Take labels; the last one of each key counts, and none takes it back."""
        for record in records:
            if record.value is None and record.key is not None:
                self._drop(record.key, record.topic)
                continue
            for message in self._messages([record]):
                if isinstance(message, Label):
                    self._facts.add_label(message)

    def _drop(self, key: bytes, topic: str) -> None:
        try:
            self._facts.drop_label(*label_key_parts(key))
        except ProtocolError:
            self.undecodable[topic] += 1

    def _messages(self, records: Iterable[Record]) -> Iterator[Message]:
        return (message for _, message in self._placed(records))

    def _placed(self, records: Iterable[Record]) -> Iterator[tuple[int, Message]]:
        for record in records:
            try:
                yield record.offset, self._codec.decode(record.value)
            except DecodeError:
                self.undecodable[record.topic] += 1


def group_of(request_id: str, prompt: PromptFacts, rule: SplitRule) -> str | None:
    """Return the name of a request's group, None where its prompt does not have what requests are grouped by."""
    if rule.group_by == "request_id":
        return request_id
    if rule.group_by == "tenant":
        return prompt.tenant
    return (prompt.metadata or {}).get(rule.group_by)
