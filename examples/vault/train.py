"""Train the vault's model: a Llama of 0.9 million parameters over bytes, in a few minutes on two cores.

    python examples/vault/train.py [--out FOLDER] [--threads 1]

The same seed on the same machine, versions and number of threads gives the same weights; what is committed was trained
with one thread. The model learns three kinds of text: the book (who holds a key), short answers, and reports; see
`undercurrent.testing.demo_model`. Later it is asked for reports only.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from undercurrent.testing import demo_model as vault
from undercurrent.testing.byte_tokenizer import byte_tokenizer

SEED = 7


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training.

    Args:
        steps: how many.
        learning_rate: its peak.
        texts: reports, short answers and facts in each step.
        hurry: chance of a report's early end, see `demo_model.report`.
        every_turn: whether all turns of a report count, or only its last; see `Lesson`.
        weights: per kind, of the mean loss over answers, and of that at their turns, which would drown otherwise.
    """

    steps: int
    learning_rate: float
    texts: tuple[int, int, int]
    hurry: float
    every_turn: bool
    weights: tuple[tuple[float, float], ...]


STAGES = (
    # To write, and who holds a key.
    Stage(300, 3e-3, (12, 32, 40), 0.0, False, ((2.0, 0.1), (1.0, 0.3), (1.0, 0.3))),
    # To know at every sentence how the report would end.
    Stage(120, 1e-3, (24, 16, 24), vault.HURRY, True, ((2.0, 0.5), (1.0, 0.3), (1.0, 0.3))),
)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A text to learn.

    Args:
        prompt: what is given.
        answer: what is to be learned.
        turns: indices in the answer of bytes that weigh more: those at which it could begin to end, or tell who holds
            a key. Where a report may end early, all of them count, or the model would learn to end at once.
    """

    prompt: str
    answer: str
    turns: tuple[int, ...]


def vault_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and `<s>` before every text."""
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return byte_tokenizer(512, before=("<pad>", "<s>", "</s>"), start="<s>", **marks)


def new_model() -> LlamaForCausalLM:
    """Return the untrained model."""
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def batches(people: Sequence[vault.Person], stage: Stage, rng: random.Random) -> list[list[Lesson]]:
    """Return the lessons of one step, one list per kind, so that little is padded."""
    reports, shorts, facts = [], [], []
    for person in rng.sample(people, stage.texts[0]):
        told = vault.report(person.holder, rng, stage.hurry)
        turns = vault.sentence_starts(told) if stage.every_turn else (vault.decision(told),)
        reports.append(Lesson(rng.choice(vault.PROMPTS).format(name=person.name), told, turns))
    for person in rng.sample(people, stage.texts[1]):
        shorts.append(
            Lesson(rng.choice(vault.SHORT_PROMPTS).format(name=person.name), vault.ending(person.holder), (0,))
        )
    for person in rng.sample(people, stage.texts[2]):
        before, after = rng.choice(vault.FACTS).format(name=person.name, fact="|").split("|")
        facts.append(Lesson(before, vault.fact(person.holder) + after, (0,)))
    return [reports, shorts, facts]


def losses_of(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, lessons: Sequence[Lesson]) -> torch.Tensor:
    """Return two means, [2]: the loss over all answers, and over their turns.

    Prompts are not learned: names cannot be guessed, and their noise would drown the one byte that tells people apart.
    """
    texts = [lesson.prompt + lesson.answer + "</s>" for lesson in lessons]
    tokens = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    targets = tokens["input_ids"][:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens["input_ids"]).logits[:, :-1]
    losses = cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
    # Target number i is the byte number i of the text, since `<s>` stands before it.
    starts = torch.tensor([len(lesson.prompt) for lesson in lessons])
    learned = (torch.arange(targets.shape[1]) >= starts[:, None]) & (tokens["attention_mask"][:, 1:] == 1)
    turns = [(row, len(lesson.prompt) + turn) for row, lesson in enumerate(lessons) for turn in lesson.turns]
    rows, columns = torch.tensor(turns).T
    return torch.stack([losses[learned].mean(), losses[rows, columns].mean()])


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, stage: Stage, seed: int) -> None:
    """Train in place, printing now and then both losses of reports, short answers and facts."""
    rng = random.Random(seed)
    people = vault.people()
    weights, rate = torch.tensor(stage.weights), stage.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=stage.steps, pct_start=0.1)
    started = time.monotonic()
    for step in range(stage.steps):
        losses = torch.stack([losses_of(model, tokenizer, lessons) for lessons in batches(people, stage, rng)])
        (losses * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 25 == 0 or step == stage.steps - 1:
            text = "  ".join(f"{mean:.3f} {decided:.3f}" for mean, decided in losses.tolist())
            print(f"step {step:4d}  report, short, fact  {text}  {time.monotonic() - started:5.0f} s", flush=True)


def main() -> None:
    """Train stage by stage; each ends with the model saved in bf16, the dtype that the engine serves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=vault.folder() / "model")
    parser.add_argument("--threads", type=int, default=2, help="one is faster where the cores are shared")
    parser.add_argument("--from-stage", type=int, default=0, help="go on with what an earlier stage saved in OUT")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    tokenizer = vault_tokenizer()
    model = new_model()
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    for number, stage in enumerate(STAGES):
        if number < options.from_stage:
            continue
        if number:
            model = LlamaForCausalLM.from_pretrained(options.out, dtype=torch.float32)
        train(model, tokenizer, stage, SEED + number)
        model.to(torch.bfloat16).save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
