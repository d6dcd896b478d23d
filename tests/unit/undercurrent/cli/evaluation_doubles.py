"""A dataset with labels of two sources, spans, users, texts and aborts, and a probe of its planted direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models

from tests.unit.probe_consumers.dataset_doubles import Topics, rows
from undercurrent.evaluation.dataset_split import SplitRule
from undercurrent.probes import LinearProbe
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.protocol.messages import AbortCause, CommandSource, Outcome
from undercurrent.testing.streams import StreamBuilder, encoded

LAYERS = (3, 5)
PROMPT, TOKENS = 2, 12
ONSET = 6
WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe") for b in ("ban", "dor", "fel", "gim")]


def is_positive(number: int) -> bool:
    return number % 3 == 0


def write_dataset(
    folder: Path,
    count: int = 300,
    *,
    rule: SplitRule | None = None,
    labels: bool = True,
    aborted: int = 0,
    holdout: Sequence[HoldoutRule] = (),
    token_ids: bool = True,
) -> Path:
    """Write requests r0, r1, ...: positives are shifted at layer 5 from token 6 on.

    Args:
        folder: to write.
        count: requests.
        rule: of the split.
        labels: the source `ann` labels all but every tenth, with spans; `judge` labels the first sixty, some otherwise.
        aborted: of the first so many requests, the positives were stopped at the onset.
        holdout: whom the engine held out, one rule after the other.
        token_ids: whether the records carry token ids.
    """
    made = Topics()
    for number in range(count):
        name, label = f"r{number}", is_positive(number)
        held = holdout[number * len(holdout) // count].of(name) if holdout else None
        stopped = label and number < aborted and not (held and held.held)
        length = ONSET + 3 if stopped else TOKENS
        values = rows(name, TOKENS)
        values[ONSET:, 1, 2] += 4.0 * label
        stream = StreamBuilder(name, layers=LAYERS, prompt_len=PROMPT, dtype="float32")
        rng = np.random.default_rng(number)
        metadata = {"user": f"u{number // 3}", "language": "de" if number % 2 else "en"}
        made.prompt(name, " ".join(rng.choice(WORDS, 12)), metadata=metadata)
        said = rng.choice(WORDS, length - PROMPT)
        ids = np.array([0] * PROMPT + [WORDS.index(word) for word in said], "<i4")
        blocks = [stream.start()]
        for start, stop in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, length))]:
            block = stream.activations(list(range(start, stop)), values[start:stop], step=start)
            blocks.append(encoded(replace(block, token_ids=ids[start:stop].tobytes() if token_ids else b"")))
        made.activations(stream, *blocks, stream.end())
        cause = (
            AbortCause(command_id=name, source=CommandSource.PROBE, probe="guard", token_pos=ONSET) if stopped else None
        )
        ending = {"outcome": Outcome.ABORTED, "finish_reason": "abort", "abort": cause} if stopped else {}
        made.answer(name, said[0], *[" " + word for word in said[1:]], holdout=held, **ending)
        if labels and number % 10 != 9:
            span = {"token_start": ONSET, "token_end": TOKENS} if label else {}
            made.label(name, "positive" if label else "negative", **span)
            if number < 60:
                made.label(name, "negative" if number % 20 == 0 or not label else "positive", source="judge")
    made.export(folder, **({} if rule is None else {"split": rule}))
    return folder


def write_tokenizer(path: Path) -> Path:
    """Write a tokenizer whose tokens are the words."""
    Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)})).save(str(path))
    return path


def write_probe(folder: Path, *, threshold: float = 3.0, layer: int = 5, width: int = 4, **settings: object) -> Path:
    """Write the probe that reads the planted direction."""
    weight = np.eye(width)[min(2, width - 1)]
    settings = {"name": folder.name, "positions": "generated"} | settings
    LinearProbe.from_arrays(
        weight, 0.0, layer=layer, tensor_type="residual_stream", threshold=threshold, **settings
    ).save(folder)
    return folder
