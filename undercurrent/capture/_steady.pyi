from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Array = npt.NDArray[np.generic[Any]]

LAYOUT: tuple[int, ...]

class Stepper:
    def __new__(
        cls, words: Buffer, data: Buffer, reserve: int, by_id: dict[str, int], counters: _Array, /
    ) -> Stepper: ...
    def use(self, requests: _Array, columns: tuple[tuple[Any, ...], ...], /) -> None: ...
    def run(
        self,
        step: int,
        rows: int,
        now_us: int,
        engine_ids: list[str],
        computed: Buffer,
        starts: Buffer,
        token_ids: Buffer,
        log: list[bytes],
        encode: Callable[[int, int, bytes], None],
        /,
    ) -> int: ...
