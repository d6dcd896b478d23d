"""What an engine's deltas say, put together."""

from __future__ import annotations

import asyncio


def within(coroutine, timeout_s=60):
    async def bounded():
        async with asyncio.timeout(timeout_s):
            return await coroutine

    return asyncio.run(bounded())


def tokens(deltas, index=0):
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def text(deltas, index=0):
    return "".join(delta.text for delta in deltas if delta.index == index)
