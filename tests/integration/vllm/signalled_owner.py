"""A process that drives an engine and is told to stop: it lets its request end first, then closes the engine."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from harness import Harness

TOKENS = 200


def say(text: str) -> None:
    sys.stdout.write(f"owner: {text}\n")
    sys.stdout.flush()


def main(model: Path) -> None:
    # Without points nothing but the owner's own arrangements ties the engine to it.
    harness = Harness(model, points=(), max_num_seqs=8, max_num_batched_tokens=48, num_gpu_blocks_override=40)
    harness.start()
    tokens, told = 0, []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: told.append((which, tokens)))

    async def generate() -> str | None:
        nonlocal tokens
        reason = None
        request = harness.request("r", [1, 2, 3], points=(), max_tokens=TOKENS)
        async for delta in harness.engine.submit(request):
            if not tokens:
                say("running")
            tokens += len(delta.token_ids)
            reason = delta.finish_reason
        return reason

    reason = harness.call(generate())
    began = time.monotonic()
    harness.close()
    in_time = {which for which, at in told if at < TOKENS}
    say(f"{reason} after {tokens} tokens, {len(in_time)} signals, closed in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
