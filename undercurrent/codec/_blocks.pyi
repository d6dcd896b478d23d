from collections.abc import Mapping, Sequence
from typing import Any

from undercurrent.codec.blocks import Prefix
from undercurrent.protocol.messages import ActivationBlock

def encode(
    prefix: bytes,
    seq: int,
    revision: int,
    step: int,
    captured_at_us: int,
    positions: bytes | memoryview,
    token_ids: bytes | memoryview,
    data: bytes | memoryview,
    /,
) -> bytes: ...
def read(
    value: bytes, at: int, token_bytes: int, kind: type[ActivationBlock], same: tuple[object, ...], /
) -> ActivationBlock | None: ...
def strands(
    records: list[Any], at: int, known: Mapping[bytes | None, Sequence[Prefix]], /
) -> tuple[int, list[tuple[Any, ...]]]: ...
