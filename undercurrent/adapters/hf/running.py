"""One child of a request while it runs: its tokens, its text, and what ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from undercurrent.adapters.base import EngineDelta, EngineRequest
from undercurrent.adapters.hf.sampling import DEFAULT_MAX_TOKENS, Sampler
from undercurrent.adapters.hf.text import Detokenizer, StopText


class Mailbox:
    """Where the model's thread leaves what the event loop of a request waits for. Made on that loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[EngineDelta | Exception] = asyncio.Queue()

    def put(self, item: EngineDelta | Exception) -> None:
        """Leave something; from any thread."""
        # The loop may have ended, and so has whoever would have listened.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self) -> EngineDelta:
        """Wait for the next delta.

        Raises:
            EngineDeadError: the engine is gone.
        """
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item


class Running:
    """See the module.

    Args:
        request: checked, with its prompt as token ids.
        index: of the child.
        decode: token ids to text.
        eos: token ids that end a text.
        max_model_len: most tokens of prompt plus generation.
        mailbox: where its deltas go.
    """

    def __init__(
        self,
        request: EngineRequest,
        index: int,
        *,
        decode: Callable[[Sequence[int]], str],
        eos: frozenset[int],
        max_model_len: int,
        mailbox: Mailbox,
    ) -> None:
        sampling = request.sampling
        prompt = request.prompt_token_ids or ()
        self.request = request
        self.index = index
        # No two children have the same: the index ends at the first underscore.
        self.id = f"{index}_{request.engine_id}"
        self.mailbox = mailbox
        self.cache: Any = None
        self.computed = 0
        self.captured = False
        self.aborted = False
        self.prompt = prompt
        self.generated: list[int] = []
        self._ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)
        self._most = min(sampling.max_tokens or DEFAULT_MAX_TOKENS, max_model_len - len(prompt))
        self._sampler = Sampler(sampling, index)
        self._detokenizer = Detokenizer(decode, prompt)
        self._stop = StopText(sampling.stop)

    @property
    def pending(self) -> int:
        """Tokens that the next forward passes compute before one can be chosen."""
        return len(self.prompt) + len(self.generated) - self.computed

    def inputs(self, count: int) -> Sequence[int]:
        """Return the next `count` of them."""
        if self.computed >= len(self.prompt):
            first = self.computed - len(self.prompt)
            return self.generated[first : first + count]
        return self.prompt[self.computed : self.computed + count]

    def advance(self, logits: Any) -> EngineDelta:  # noqa: ANN401 - a tensor; this module knows no torch
        """Choose the next token.

        Args:
            logits: after the last token that was computed.
        """
        token = self._sampler.choose(logits, self.prompt, self.generated)
        self.generated.append(token)
        if token in self._ends:
            # As with vLLM the token is reported, and has no text.
            return self._delta((token,), self._stop.flush(), "stop")
        text = self._stop.push(self._detokenizer.push(token))
        if self._stop.stopped:
            return self._delta((token,), text, "stop")
        if len(self.generated) >= self._most:
            return self._delta((token,), text + self._stop.flush(), "length")
        return self._delta((token,), text, None)

    def abort(self) -> EngineDelta:
        """Return its last delta, as one that was stopped from outside."""
        return self._delta((), self._stop.flush(), "abort")

    def _delta(self, tokens: tuple[int, ...], text: str, finish_reason: str | None) -> EngineDelta:
        return EngineDelta(
            index=self.index,
            token_ids=tokens,
            text=text,
            finish_reason=finish_reason,
            prompt_tokens=len(self.prompt),
        )
