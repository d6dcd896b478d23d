"""From messages to a prompt: by the tokenizer's template, or plainly."""

from __future__ import annotations

from typing import Any

import pytest

from examples.openai_server.chat import Prompt, chat_prompt
from examples.openai_server.errors import ApiError
from examples.openai_server.schema import Message
from undercurrent.testing.byte_tokenizer import byte_tokenizer

TEMPLATE = (
    "<s>{% for message in messages %}"
    "{% if message.role == 'assistant' and loop.first %}{{ raise_exception('the user speaks first') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(**marks: Any) -> Any:
    made = byte_tokenizer(512, before=("<s>", "</s>"), bos_token="<s>", eos_token="</s>", **marks)
    made.chat_template = TEMPLATE
    return made


def said(role: str, content: str) -> Message:
    return Message.model_validate({"role": role, "content": content})


CHAT = [said("developer", "Be brief."), said("user", "Who?")]


def test_the_tokenizers_template_is_used_and_adds_no_stop() -> None:
    assert chat_prompt(tokenizer(), CHAT) == Prompt("<s>[system] Be brief.\n[user] Who?\n[assistant]")


def test_a_start_mark_that_the_tokenizer_adds_by_itself_is_not_there_twice() -> None:
    made = tokenizer(start="<s>")
    prompt = chat_prompt(made, CHAT)
    assert prompt.text.startswith("[system]")
    assert made.encode(prompt.text).count(made.bos_token_id) == 1
    without = tokenizer()
    assert without.encode(chat_prompt(without, CHAT).text).count(without.bos_token_id) == 1


def test_what_the_template_refuses_is_the_clients_error() -> None:
    with pytest.raises(ApiError) as caught:
        chat_prompt(tokenizer(), [said("assistant", "Hi.")])
    assert (caught.value.status_code, caught.value.param) == (400, "messages")
    assert "the user speaks first" in caught.value.detail


def test_without_a_template_a_chat_is_a_script_that_ends_at_the_next_speech() -> None:
    made = tokenizer()
    made.chat_template = None
    chat = [*CHAT, said("assistant", "Me."), said("user", "Why?")]
    text = "System: Be brief.\nUser: Who?\nAssistant: Me.\nUser: Why?\nAssistant:"
    assert chat_prompt(made, chat) == Prompt(text, stop=("\nUser:",))
