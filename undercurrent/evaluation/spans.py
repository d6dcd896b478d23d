"""Spans of a generated text as spans of its tokens: by what each token added to the text when it was decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undercurrent.errors import DatasetError


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What a request generated.

    Args:
        prompt_tokens: tokens of its prompt: the absolute position of the first generated one.
        token_ids: generated.
        text: as the engine released it.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of a span of text.

    Args:
        start: absolute position of the first one.
        end: position after the last one.
        exact: the text's ends are ends of tokens; else the span was widened to whole tokens.
    """

    start: int
    end: int
    exact: bool


def load_tokenizer(path: Path) -> Any:  # noqa: ANN401 - tokenizers.Tokenizer has no types
    """Return the tokenizer in a `tokenizer.json`, or in the folder of one.

    Raises:
        DatasetError: there is none that can be read.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises plain exceptions
        raise DatasetError(f"{file}: no tokenizer that can be read: {exc}") from exc


def token_offsets(tokenizer: Any, token_ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:  # noqa: ANN401
    """Decode tokens one after the other; return the text and which characters of it each token made.

    Tokens that make characters only together, such as the bytes of one character, have the same characters.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        token_ids: generated.
    """
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    text = ""
    offsets: list[tuple[int, int]] = []
    waiting = 0
    for token_id in token_ids:
        waiting += 1
        if (piece := stream.step(tokenizer, token_id)) is None:
            continue
        offsets += [(len(text), len(text) + len(piece))] * waiting
        text, waiting = text + piece, 0
    return text, offsets + [(len(text), len(text))] * waiting


class SpanMapper:
    """Maps spans of one request's text.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, of the model that generated it.
        generated: what it generated.
    """

    def __init__(self, tokenizer: Any, generated: Generated) -> None:  # noqa: ANN401
        decoded, self._offsets = token_offsets(tokenizer, generated.token_ids)
        # A stop text is cut off what is released, so the tokens may say more than the text.
        self._fits = decoded.startswith(generated.text)
        self._generated = generated

    def tokens(self, start: int, end: int) -> TokenSpan | str:
        """Return the tokens of the characters from `start` to before `end`, or in words why there are none."""
        if not self._fits:
            return "the tokenizer makes another text of these tokens: is it that of the model?"
        if end > len(self._generated.text):
            return f"ends at character {end}; the generated text has {len(self._generated.text)}"
        inside = [place for place, (first, last) in enumerate(self._offsets) if first < end and last > start]
        if not inside:
            return "no token has any of its characters"
        first, last = inside[0], inside[-1]
        exact = self._offsets[first][0] == start and self._offsets[last][1] == end
        base = self._generated.prompt_tokens
        return TokenSpan(base + first, base + last + 1, exact)
