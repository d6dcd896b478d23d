"""Capture in the thread that runs the model: it joins hooks, tracker and ring to the engine's steps.

Nothing raised here reaches a request that generates: what concerns one ends its capture with an error, what concerns a
step ends the capture of those in it, and generation goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from undercurrent.adapters.checks import with_token_id
from undercurrent.adapters.hf.beside import look
from undercurrent.adapters.hf.hooks import HookSet, source
from undercurrent.adapters.hf.model import LoadedModel
from undercurrent.adapters.hf.running import Running
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, TapGroup, tap_groups
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.errors import CaptureError
from undercurrent.spec import ExtractionPoint

logger = logging.getLogger(__name__)

DEFAULT_MAX_TAP_BYTES = 1 << 30
_RING_SHARE = 4


class HFCapture:
    """See the module; used from one thread.

    Args:
        loaded: the model.
        ring: where frames go.
        points: what requests may order.
        max_rows: most rows of a step.
        max_seqs: most requests of a step.
        max_tap_bytes: refuse buffers beyond this.
        block_timeout_s: how long a point with `overflow: block` waits for the ring's reader.
        check_plans: verify the capture plan in every step; for tests.

    Raises:
        CaptureError: a point cannot be captured on this model.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ring: Ring,
        points: Sequence[ExtractionPoint],
        *,
        max_rows: int,
        max_seqs: int,
        max_tap_bytes: int,
        block_timeout_s: float,
        check_plans: bool,
    ) -> None:
        self._loaded = loaded
        self._ring = ring
        self._most_rows = max_rows
        self._max_tap_bytes = max_tap_bytes
        self._parts = loaded.parts()
        self._beside = look(loaded, self._parts)
        self._dead = False
        captured = self._points(points)
        self._hooks = self._hook_set(captured, {})
        self._known = frozenset(point.name for point in captured)
        self._tracker = Tracker(
            captured,
            self._hooks.rows_as_bytes(),
            ring.writer(),
            block_timeout_s=block_timeout_s,
            check_plans=check_plans,
        )
        self._batch = Batch(
            step=0,
            rows=0,
            engine_ids=[],
            computed=np.zeros(max_seqs, np.int32),
            starts=np.zeros(max_seqs + 1, np.int32),
            token_ids=np.zeros(max_rows, np.int32),
        )

    @property
    def max_rows(self) -> int:
        """Most rows of a step, such that a slow reader of the ring does not lose the first of a long prompt."""
        row_bytes = sum(group.row_bytes for group in self._tracker.groups)
        if not row_bytes or not self._tracker.live:
            return self._most_rows
        return max(1, min(self._most_rows, self._ring.capacity // _RING_SHARE // row_bytes))

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensor types whose rows are no vectors of the hidden size."""
        return self._beside.shapes

    @property
    def waiting(self) -> bool:
        """Whether frames wait in memory for room in the ring."""
        return self._ring.stats().pending_controls > 0

    def set_points(self, points: Sequence[ExtractionPoint]) -> None:
        """Let requests order exactly these points; called between steps. Streams that are open keep theirs.

        Args:
            points: names are unique.

        Raises:
            CaptureError: one of them cannot be captured, by name; nothing has changed then.
        """
        if self._dead:
            raise CaptureError("capture has stopped in this engine; its log says why")
        captured = self._points(points)
        known = {point.name: point for point in (*captured, *self._tracker.used_points)}
        hooks = self._hook_set(tuple(known.values()), self._hooks.buffers)
        try:
            self._tracker.set_points(tuple(known.values()), hooks.rows_as_bytes())
        except CaptureError:
            hooks.remove()
            raise
        self._hooks.remove()
        self._hooks = hooks
        self._known = frozenset(point.name for point in captured)

    def open(self, child: Running) -> None:
        """Open the streams of a request that is about to run; one whose order is wrong runs uncaptured."""
        if child.request.capture is not None and child.request.capture.points:
            self._safely(lambda: self._open(child))

    def close(self, child: Running) -> None:
        """End the streams of a request; all of its rows are in the ring by then."""
        self._safely(lambda: self._tracker.close(child.id))
        child.captured = False

    def begin(self, step: int) -> None:
        """Begin a step.

        Args:
            step: its number.
        """
        batch = self._batch
        batch.step, batch.rows, batch.engine_ids = step, 0, []

    def arm(self, child: Running, token_ids: Sequence[int]) -> None:
        """Expect a forward pass of the step.

        Args:
            child: whose.
            token_ids: that it computes.
        """
        batch, count = self._batch, len(token_ids)
        slot, first = len(batch.engine_ids), batch.rows
        batch.engine_ids.append(child.id)
        batch.computed[slot] = child.computed
        batch.starts[slot + 1] = first + count
        batch.token_ids[first : first + count] = token_ids
        batch.rows += count
        if child.captured:
            self._hooks.arm(first, count, child.cache)

    def disarm(self, child: Running) -> None:
        """End the forward pass; if it did not give the rows that it should, capture of its request ends."""
        if not child.captured:
            return
        problem = self._hooks.disarm(child.cache)
        if problem is not None:
            logger.error("capture of request %s ends: %s", child.request.engine_id, problem)
            self._safely(lambda: self._tracker.fail([child.id], problem))
            child.captured = False

    def write(self) -> None:
        """Write the rows of the step, and show them to whoever reads."""
        self._safely(self._write)

    def idle(self, step: int) -> None:
        """Write what waits for room, while nothing runs.

        Args:
            step: number of the last step.
        """
        self._safely(lambda: self._tracker.idle(step))

    def _open(self, child: Running) -> None:
        order = child.request.capture
        assert order is not None  # noqa: S101 - asked for above
        try:
            missing = sorted(set(order.points) - self._known)
            if missing:
                raise CaptureError(f"unknown extraction points: {', '.join(missing)}")
            # Nobody has to say how far it is: this engine computes a token's row only after it has given the token out.
            wanted = dataclasses.replace(order.as_order(), slot=-1)
            self._tracker.open(child.id, wanted, index=child.index, prompt_len=len(child.prompt), cached_prefix=0)
            child.captured = True
        except CaptureError as exc:
            logger.warning("request %s runs uncaptured: %s", child.request.engine_id, exc)
            self._tracker.fault("bad_order", str(exc), child.request.engine_id)

    def _write(self) -> None:
        try:
            self._tracker.step(self._batch)
        # The step's edge: its requests lose their capture, and only that.
        except Exception as exc:
            logger.exception("capture failed in step %d", self._batch.step)
            self._tracker.fail(self._batch.engine_ids, f"{type(exc).__name__}: {exc}")

    def _safely(self, work: Callable[[], None]) -> None:
        """Do something; should it fail, capture stops for good, and the engine goes on."""
        if self._dead:
            return
        try:
            work()
        # The engine's step is our loop's edge: whatever we did wrong must not stop the engine.
        except Exception as exc:
            logger.exception("capture stops, serving goes on")
            self._dead = True
            try:
                self._tracker.fault("capture_error", f"capture stopped: {type(exc).__name__}: {exc}")
                self._tracker.fail_all(f"{type(exc).__name__}: {exc}")
            # The last resort of the same edge.
            except Exception:
                logger.exception("capture could not even say so")

    def _points(self, points: Sequence[ExtractionPoint]) -> tuple[CapturePoint, ...]:
        loaded = self._loaded
        encode = functools.partial(loaded.own_tokenizer.encode, add_special_tokens=False)
        captured = tuple(
            CapturePoint.of(
                with_token_id(point, encode),
                layers=loaded.layers,
                width=loaded.width,
                model_dtype=loaded.dtype,
                shapes=self._beside.shapes,
            )
            for point in points
        )
        for point in captured:
            for layer in point.group.layers:
                try:
                    self._beside.check(point.group.tensor_type, layer)
                    if point.group.tensor_type != "kv":
                        source(self._parts, point.group.tensor_type, layer)
                except CaptureError as exc:
                    raise CaptureError(f"point {point.name!r}: {exc}") from exc
        return captured

    def _hook_set(self, points: Sequence[CapturePoint], buffers: Mapping[TapGroup, torch.Tensor]) -> HookSet:
        groups = tap_groups(points)
        wanted = sum(group.row_bytes for group in groups) * self._most_rows
        if wanted > self._max_tap_bytes:
            raise CaptureError(
                f"the points need {wanted} bytes for {self._most_rows} rows, more than max_tap_bytes = "
                f"{self._max_tap_bytes}: capture fewer layers or lower max_num_batched_tokens"
            )
        return HookSet(groups, self._parts, max_rows=self._most_rows, known=buffers)
