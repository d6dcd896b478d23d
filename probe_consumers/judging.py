"""Blocks for probes that want to see them one by one, or record by record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from probe_consumers.chunks import Chunk, Scores
from probe_consumers.unsaid import Unsaid
from undercurrent.codec import as_array, views
from undercurrent.core import Probe, ProbeAction, ProbeSignal
from undercurrent.errors import ProbeError
from undercurrent.protocol.messages import ActivationBlock, StreamStarted

_STRENGTH = (ProbeAction.CONTINUE, ProbeAction.FLAG, ProbeAction.ABORT)


def judge_records(probe: Probe, block: ActivationBlock, prompt_len: int) -> tuple[list[ProbeSignal], Unsaid]:
    """Show a block to a probe record by record; return the signals that act, and the scores.

    Args:
        probe: the probe.
        block: the block.
        prompt_len: tokens of the prompt.

    Raises:
        ProbeError: a value is not finite.
    """
    values = as_array(block)
    if not np.isfinite(values.astype(np.float32)).all():
        raise ProbeError(f"a value of the block at seq {block.seq} is not finite")
    scores = np.full(values.shape[:2], np.nan, "<f4")
    signals: list[ProbeSignal] = []
    for at, record in enumerate(views(block, prompt_len)):
        signal = probe.on_activation(record)
        if signal is None:
            continue
        if signal.score is not None:
            scores[divmod(at, len(block.layers))] = signal.score
        if signal.acts:
            position = record.token_pos if signal.token_pos is None else signal.token_pos
            layer = record.layer if signal.layer is None else signal.layer
            signals.append(replace(signal, token_pos=position, layer=layer))
    return signals, Unsaid(block.positions, block.layers, scores.tobytes())


def kind_of(message: ActivationBlock | StreamStarted) -> str:
    """Return what must be equal in all blocks of a stream, in words."""
    shape = list(message.row_shape) if message.row_shape else f"width {message.width}"
    return f"{message.dtype} {message.tensor_type}, {shape}"


def cut(chunk: Chunk, scores: Scores) -> list[Scores]:
    """Return the scores of each block."""
    if scores.values is None or not scores.layers:
        return [scores] * len(chunk)
    found, at = [], 0
    for count in chunk.tokens:
        found.append(Scores(scores.layers, scores.values[at : at + count]))
        at += count
    return found


def rank(signal: ProbeSignal) -> int:
    """Return how strong a signal's action is."""
    return _STRENGTH.index(signal.action)
