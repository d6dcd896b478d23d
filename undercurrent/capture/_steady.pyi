from typing_extensions import Buffer

LAYOUT: tuple[int, ...]

class Steady:
    def __new__(
        cls,
        words: Buffer,
        data: Buffer,
        reserve: int,
        engine_ids: list[str],
        starts: bytes,
        computed: bytes,
        rows: int,
        valid_for: int,
        history: list[bytes],
        lanes: tuple[tuple[object, object, object, int, int, int, int, int], ...],
        /,
    ) -> Steady: ...
    def run(
        self,
        steps: int,
        step: int,
        rows: int,
        now_us: int,
        engine_ids: list[str],
        computed: Buffer,
        starts: Buffer,
        token_ids: Buffer,
        /,
    ) -> int: ...
