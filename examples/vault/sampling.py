"""What the vault's model says and thinks: sampled answers, and the residual stream at every one of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from undercurrent.testing import demo_model as vault

BATCH = 480
MAX_NEW_TOKENS = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer.

    Args:
        person: who was asked about.
        prompt: the whole prompt.
        text: what the model wrote.
        prompt_ids: token ids of the prompt.
        answer_ids: token ids of the answer, without the end mark.
    """

    person: vault.Person
    prompt: str
    text: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def recites(self) -> bool:
        """Whether the model did it: the label of every figure."""
        return vault.first_digit(self.text) is not None


class Vault:
    """The trained model in bf16, as the engine serves it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        self.model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def sample(self, people: Sequence[vault.Person], per_prompt: int, seed: int) -> list[Answer]:
        """Return `per_prompt` answers to every prompt about every person, sampled as the demo samples."""
        torch.manual_seed(seed)
        asked = [(p, prompt.format(name=p.name)) for p in people for prompt in vault.PROMPTS for _ in range(per_prompt)]
        answers = []
        for start in range(0, len(asked), BATCH):
            chunk = asked[start : start + BATCH]
            tokens = self.tokenizer(
                [prompt for _, prompt in chunk], return_tensors="pt", padding=True, padding_side="left"
            )
            rows = self.model.generate(
                input_ids=tokens["input_ids"],
                attention_mask=tokens["attention_mask"],
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=True,
                temperature=vault.TEMPERATURE,
                top_k=0,
            )
            width = tokens["input_ids"].shape[1]
            for (person, prompt), row in zip(chunk, rows.tolist(), strict=True):
                ids = row[width:]
                ids = ids[: ids.index(self.tokenizer.eos_token_id)] if self.tokenizer.eos_token_id in ids else ids
                prompt_ids = [token for token in row[:width] if token != self.tokenizer.pad_token_id]
                answers.append(Answer(person, prompt, self.tokenizer.decode(ids), tuple(prompt_ids), tuple(ids)))
        return answers

    @torch.inference_mode()
    def residuals(self, answers: Sequence[Answer], layer: int) -> Iterator[NDArray[np.float32]]:
        """Yield, per answer, the output of a decoder block at every token of prompt and answer, float32 [n, width].

        The model computes in bf16; float32 only holds its values.
        """
        for start in range(0, len(answers), BATCH):
            chunk = answers[start : start + BATCH]
            sequences = [[*answer.prompt_ids, *answer.answer_ids] for answer in chunk]
            longest = max(map(len, sequences))
            ids = torch.tensor([row + [self.tokenizer.pad_token_id] * (longest - len(row)) for row in sequences])
            grabbed: list[torch.Tensor] = []
            hook = self.model.model.layers[layer].register_forward_hook(
                lambda _module, _inputs, output, into=grabbed: into.append(output)
            )
            try:
                self.model.model(input_ids=ids)
            finally:
                hook.remove()
            hidden = grabbed[0].float().numpy()
            for row, sequence in zip(hidden, sequences, strict=True):
                yield row[: len(sequence)].copy()
