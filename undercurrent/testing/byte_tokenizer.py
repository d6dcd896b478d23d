"""A tokenizer with one token per byte, in the format of transformers: for models of our own."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(
    max_len: int, *, before: Sequence[str] = (), after: Sequence[str] = (), start: str | None = None, **marks: str
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 bytes and some marks.

    Args:
        max_len: most tokens of a text.
        before: marks with ids from 0; the bytes, in the order of the byte alphabet, follow.
        after: marks with ids after the bytes.
        start: mark that is put before every text.
        marks: what transformers calls them: `eos_token`, `pad_token`, ...
    """
    symbols = [*before, *sorted(pre_tokenizers.ByteLevel.alphabet()), *after]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if start is not None:
        special = [(start, vocabulary[start])]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_len, **marks)
