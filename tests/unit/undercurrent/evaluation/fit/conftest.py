from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from undercurrent.evaluation.fit import LabelledRequest, Site

NEAR, FAR = Site("residual_stream", 1), Site("residual_stream", 4)

Traffic = Callable[..., list[LabelledRequest]]


@pytest.fixture
def traffic() -> Traffic:
    """Requests whose positives are shifted along one axis at `FAR`; at `NEAR` there is noise alone."""

    def make(
        count: int = 120, *, seed: int = 0, shift: float = 2.0, width: int = 8, prefix: str = "r"
    ) -> list[LabelledRequest]:
        rng = np.random.default_rng(seed)
        blocks = []
        for number in range(count):
            tokens = int(rng.integers(10, 40))
            label = bool(rng.random() < 0.4)
            far = rng.normal(size=(tokens, width)) + 3.0
            far[:, 2] += shift * label
            blocks.append(
                LabelledRequest(
                    request_id=f"{prefix}{seed}-{number}",
                    positions=np.arange(tokens, dtype=np.int32),
                    rows={FAR: far.astype(np.float32), NEAR: rng.normal(size=(tokens, width)).astype(np.float32)},
                    label=label,
                    group=f"{prefix}{seed}-{number // 2}",
                    prompt_len=4,
                )
            )
        return blocks

    return make
