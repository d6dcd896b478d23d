"""From the messages of a chat to the text that the model continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from .errors import ApiError
from .schema import Message

_NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine gets.

    Args:
        text: to continue.
        stop: texts that end the answer, besides those that the client names.
    """

    text: str
    stop: tuple[str, ...] = ()


def chat_prompt(tokenizer: Any, messages: Sequence[Message]) -> Prompt:  # noqa: ANN401 - any tokenizer
    """Return the prompt of a chat: by the tokenizer's own template, else in the plain form of `plain_prompt`.

    Raises:
        ApiError: the template refuses these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        return plain_prompt(messages)
    # `developer` is OpenAI's newer word for `system`, which is the one that templates know.
    turns = [{"role": "system" if m.role == "developer" else m.role, "content": m.content} for m in messages]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as exc:
        reason = f"the model's chat template refuses these messages: {exc}"
        raise ApiError(400, reason, code="invalid_value", param="messages") from exc
    return Prompt(_without_start(tokenizer, text))


def plain_prompt(messages: Sequence[Message]) -> Prompt:
    r"""Return a chat as a script, one speech a line, for a model without a template; the next speech ends the answer.

    System: Be brief.\nUser: Who are you?\nAssistant:
    """
    lines = [f"{_NAMES[message.role]}: {message.content}" for message in messages]
    return Prompt("\n".join([*lines, "Assistant:"]), stop=("\nUser:",))


def _without_start(tokenizer: Any, text: str) -> str:  # noqa: ANN401 - any tokenizer
    """Return a text without the start mark, where the tokenizer puts one before every text by itself."""
    start = getattr(tokenizer, "bos_token", None)
    if start and text.startswith(start) and list(tokenizer.encode(""))[:1] == [tokenizer.bos_token_id]:
        return text.removeprefix(start)
    return text
