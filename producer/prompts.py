"""What a user writes, turned into prompt requests: options of a command, and lines of JSON.

A line is an object with the same names as the command's options:

    {"prompt": "Tell me about Velmora.", "request_id": "a-1", "max_tokens": 64, "metadata": {"template": "v2"}}

Every error names the line and the field, and says nothing about the lines around it: they are good.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import uuid_utils
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from undercurrent.protocol.messages import Label, LabelValue, PromptRequest, Sampling

MAX_ID_CHARS = 256
MAX_DEADLINE_S = 1e9
_Word = Annotated[str, Field(min_length=1, pattern=r"^[^|]+$")]


class Prompt(BaseModel):
    """One prompt as a user writes it, checked; `request` makes the message of it.

    Args:
        prompt: text to continue; exactly one of this and `prompt_token_ids` is given.
        prompt_token_ids: token ids to continue.
        request_id: id; a UUIDv7 where none is given.
        model: model that must run it, None for any.
        lora: name of a LoRA adapter that the engine has.
        points: extraction points wanted; None means all of the pipeline's.
        deadline_s: not started later than this many seconds after it was sent.
        skip_prefix_cache: compute the whole prompt, so that no position is missing from the activations.
        tenant: on whose behalf.
        priority: lower runs first where the engine supports it.
        metadata: the sender's own words.
        traceparent: W3C trace context.
        labels: what is known of it already, by name: positive, negative or unknown. They go to the topic of labels,
            never to an engine.
        label_source: who says so.

    The rest are the sampling parameters of `Sampling`, under their own names.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: str | None = None
    prompt_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)] | None = (
        None
    )
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    model: str | None = None
    lora: str | None = None
    points: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S, allow_inf_nan=False)] | None = None
    skip_prefix_cache: bool = False
    tenant: str | None = None
    priority: int = 0
    metadata: dict[str, str] = Field(default_factory=dict)
    traceparent: str | None = None
    labels: dict[_Word, Literal["positive", "negative", "unknown"]] = Field(default_factory=dict)
    label_source: _Word = "prompt"

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: Annotated[tuple[str, ...], Field(strict=False)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = ()
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise ValueError("give exactly one of prompt and prompt_token_ids")
        return self

    def request(self, now_us: int) -> PromptRequest:
        """Return the message that asks for this prompt.

        Args:
            now_us: microseconds since the Unix epoch; the deadline counts from here.
        """
        sampling = Sampling(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Sampling)})
        return PromptRequest(
            request_id=self.request_id or new_request_id(),
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            model=self.model,
            lora=self.lora,
            points=self.points,
            sampling=sampling,
            skip_prefix_cache=self.skip_prefix_cache,
            deadline_us=None if self.deadline_s is None else now_us + int(self.deadline_s * 1_000_000),
            tenant=self.tenant,
            priority=self.priority,
            metadata=self.metadata,
            created_at_us=now_us,
            traceparent=self.traceparent,
        )

    def label_messages(self, request: PromptRequest) -> list[Label]:
        """Return what is known of the prompt already, as messages.

        Args:
            request: the message that was made of this prompt.
        """
        return [
            Label(
                request_id=request.request_id,
                name=name,
                value=LabelValue(value),
                source=self.label_source,
                created_at_us=request.created_at_us,
            )
            for name, value in self.labels.items()
        ]


def new_request_id() -> str:
    """Return a fresh id, a UUIDv7: ids sort by the time they were made."""
    return str(uuid_utils.uuid7())


@dataclass(frozen=True, slots=True)
class LineError:
    """A line that makes no prompt.

    Args:
        source: name of the file.
        line: its number, from 1.
        reason: the field and what is wrong with it.
    """

    source: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


def check(fields: Mapping[str, Any]) -> Prompt | str:
    """Return the prompt that some fields make, or what is wrong with them, field by field, in one line."""
    for name, value in fields.items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            # JSON can escape half a character, and so can a shell's argument: no message can carry it.
            return f"{name}: holds half a surrogate pair, which is no text"
    try:
        return Prompt.model_validate(fields)
    except ValidationError as exc:
        return "; ".join(_reason(dict(error)) for error in exc.errors(include_url=False, include_input=False))


def read_lines(lines: Iterable[str], source: str, defaults: Mapping[str, Any]) -> Iterator[Prompt | LineError]:
    """Yield what each line of a JSONL file makes; empty lines make nothing.

    Args:
        lines: the file.
        source: its name, for errors.
        defaults: fields that a line has unless it names them itself; `metadata` is merged key by key.
    """
    used: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        made = _read_line(line, defaults)
        if isinstance(made, str):
            yield LineError(source, number, made)
        elif made.request_id is not None and made.request_id in used:
            first = used[made.request_id]
            yield LineError(source, number, f"request_id: {made.request_id!r} is the id of line {first} already")
        else:
            if made.request_id is not None:
                used[made.request_id] = number
            yield made


def _read_line(line: str, defaults: Mapping[str, Any]) -> Prompt | str:
    try:
        line.encode()
    except UnicodeEncodeError as exc:
        return f"not UTF-8 text at character {exc.start}"
    try:
        fields = json.loads(line)
    except ValueError as exc:
        return f"not JSON: {exc}"
    except RecursionError:
        return "not JSON that makes a prompt: nested too deeply"
    if not isinstance(fields, dict):
        return f'expected an object like {{"prompt": "..."}}, got {type(fields).__name__}'
    merged = {**defaults, **fields}
    if isinstance(fields.get("metadata"), dict) and isinstance(defaults.get("metadata"), Mapping):
        merged["metadata"] = {**defaults["metadata"], **fields["metadata"]}
    return check(merged)


def _reason(error: Mapping[str, Any]) -> str:
    """Return one pydantic error as `field: what is wrong`."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown field; known are {', '.join(Prompt.model_fields)}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message[:1].lower()}{message[1:]}" if where else message
