"""What a client may send: OpenAI's request bodies, as far as this server serves them.

Parameters that would change the answer and are not served are refused by name; those that change nothing are dropped;
unknown ones are errors, as in OpenAI's own API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from .errors import ApiError

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Parameters that are taken and mean nothing here."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Parameters that are not served, with the values, null apart, at which they ask for nothing and are dropped."""


def _served(data: Any) -> Any:  # noqa: ANN401 - what a client sent
    if not isinstance(data, dict):
        return data
    for name, value in data.items():
        neutral = NEUTRAL.get(name, (value,))
        # By type, too: `logprobs: 0` asks for something, and equals False.
        if value is not None and not any(type(value) is type(known) and value == known for known in neutral):
            accepted = " or ".join(json.dumps(known) for known in (*neutral, None))
            raise ApiError(
                400,
                f"{name} is not supported by this server; accepted: {accepted}",
                code="unsupported_parameter",
                param=name,
            )
    return {key: value for key, value in data.items() if key not in IGNORED and key not in NEUTRAL}


def _one_text(value: Any) -> Any:  # noqa: ANN401 - what a client sent
    """Return the one text of a prompt, which may stand in a list."""
    texts = value if isinstance(value, list) else [value]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError("one text is accepted; neither several prompts nor token ids are")
    return texts[0]


def _content(value: Any) -> Any:  # noqa: ANN401 - what a client sent
    """Return a message's text, which may stand in parts."""
    if not isinstance(value, list):
        return value
    parts = [part for part in value if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    if len(texts) != len(value):
        raise ValueError('parts of type "text" are accepted; images, audio and files are not')
    return "".join(texts)


def _texts(value: Any) -> Any:  # noqa: ANN401 - what a client sent
    return [value] if isinstance(value, str) else value


def _encodable(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            # JSON can escape half of a character; no tokenizer takes it.
            raise ValueError("the text is not valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Texts = Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=16)]


class StreamOptions(BaseModel):
    """What a stream carries besides the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # taken, and not done


class Message(BaseModel):
    """One turn of a chat. A `name` is taken and not shown to the model."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_content)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:  # noqa: ANN401 - what a client sent
        # Clients send an answer's message back as it came, with `refusal`, `tool_calls` and others that are null.
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class _Request(BaseModel):
    """What both kinds of request share. The names that OpenAI does not have are vLLM's."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[Texts | None, BeforeValidator(_texts)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_means_nothing(cls, data: Any) -> Any:  # noqa: ANN401 - what a client sent
        return _served(data)

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is accepted only together with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters of the engine, but for max_tokens; OpenAI's defaults where it has some."""
        names = {
            *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        }
        return {"temperature": 1.0, "top_p": 1.0} | self.model_dump(include=names, exclude_none=True)


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Annotated[Text, BeforeValidator(_one_text)]

    @property
    def most_tokens(self) -> int:
        """How many tokens may be generated; 16 is OpenAI's default."""
        return self.max_tokens or 16


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def most_tokens(self) -> int | None:
        """How many tokens may be generated; None for what the context has room for."""
        return self.max_completion_tokens or self.max_tokens
