"""The taps of a worker's model, from the model's first run to the points of today, and what was proven of them when.

Where nothing is compiled they are checked when the engine is warm, and may change with the points. Where the model is
compiled or captured, what the residual stream is must be known before, in a run without a compiler; the taps are
installed then and stay; and when the engine is warm each size of step that has a graph of its own is run, and every tap
must have fired in it: a graph without taps, from a cache or a compiler that dropped them, refuses to start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.config import VllmConfig

from undercurrent.adapters.vllm import compat
from undercurrent.adapters.vllm.equal_ranks import check_equal, told_of_all
from undercurrent.adapters.vllm.selfcheck import check_ids, self_check
from undercurrent.adapters.vllm.settings import graph_key
from undercurrent.adapters.vllm.tap import TapSet, Way
from undercurrent.capture.points import TapGroup
from undercurrent.errors import CaptureError
from undercurrent.spec import TensorType

_CHECKED_ROWS = 16


class CheckedTaps:
    """See the module.

    Args:
        runner: the model runner, its model loaded and not run yet.
        config: of the engine.
        groups: what to tap.
        max_tap_bytes: refuse beyond this.

    Raises:
        CaptureError: the model lacks a part, or the buffers would be too large.
    """

    def __init__(
        self, runner: compat.Runner, config: VllmConfig, groups: Sequence[TapGroup], max_tap_bytes: int
    ) -> None:
        self._runner = runner
        self._config = config
        self._max_tap_bytes = max_tap_bytes
        self._parts = compat.parts_of(runner.model, config)
        compat.check_stage(self._parts, config)
        self._device: torch.device = next(runner.model.parameters()).device
        self._in_graph = compat.in_graph(config)
        self._modes: dict[tuple[str, int], str] = {}
        self._refused: dict[str, str] = {}
        self.stream: dict[str, str] = {}
        self.set = self._tap_set(groups, runner.max_rows)

    def before_compiling(self) -> None:
        """Where the model will be compiled or captured: check and install the taps, and make them part of its name.

        Raises:
            CaptureError: the self-check failed.
        """
        if not self._in_graph:
            return
        with compat.uncompiled(self._runner.model):
            self.stream = self._check(self.set)
        taps = [
            (tap.group.tensor_type, tap.layer, tap.mode, tap.group.dtype, tap.group.width, tap.index)
            for tap in self.set.taps
        ]
        key = f"{self._runner.max_rows} rows: {'; '.join('/'.join(map(str, tap)) for tap in taps)}"
        self._config.additional_config = graph_key(self._config.additional_config, key)

    def when_warm(self, *, everything: bool) -> None:
        """Prove the taps on the running engine, whose KV cache exists and which serves nothing yet.

        Args:
            everything: also check what later points may ask for.

        Raises:
            CaptureError: the self-check failed.
        """
        if self._in_graph:
            self._prove_graphs()
            return
        self.stream = self._check(self.set)
        if everything:
            self.stream = self._check_everything()

    def refused(self, tensor_type: str) -> str:
        """Return why a tensor type cannot be captured on this model, empty where it can."""
        return self._refused.get(tensor_type, "")

    def prepare(self, groups: Sequence[TapGroup]) -> TapSet:
        """Return taps for other points; they copy once `use` was called.

        Args:
            groups: what to tap.

        Raises:
            CaptureError: the buffers would be too large, or the taps of this engine cannot change.
        """
        if self._in_graph:
            missing = sorted({group.tensor_type for group in set(groups) - set(self.set.rows_as_bytes())})
            if missing:
                raise CaptureError(
                    f"the model is compiled with the taps of the points it was started with; {', '.join(missing)} with "
                    "these layers is none of them (set enforce_eager, or name the point at start)"
                )
            return self.set
        taps = self._tap_set(groups, self._runner.max_rows)
        for tap in taps.taps:
            tap.mode = self._modes[tap.group.tensor_type, tap.layer]
        return taps

    def use(self, taps: TapSet) -> None:
        """Take the taps of today off, and use those that `prepare` returned."""
        if taps is not self.set:
            self.set.remove()
            taps.install()
            self.set = taps

    def _tap_set(self, groups: Sequence[TapGroup], max_rows: int) -> TapSet:
        return TapSet(
            groups,
            self._parts,
            max_rows=max_rows,
            device=self._device,
            max_tap_bytes=self._max_tap_bytes,
            way=Way.GRAPH if self._in_graph else None,
        )

    def drop(self) -> None:
        """Take the taps off for good, where they are no part of a graph."""
        if not self._in_graph:
            self.set.remove()

    def _check(self, taps: TapSet) -> dict[str, str]:
        run, rows = self._runner.dummy_run, min(self._runner.max_rows, _CHECKED_ROWS)
        found: dict[str, str] = {}

        def check() -> None:
            found.update(self_check(run, taps, self._parts, self._runner.vocab_size, rows))

        if compat.tensor_ranks() == 1:
            check()
            return found
        told_of_all(check, compat.told_by_tensor_ranks)
        ids, kernels = check_ids(self._runner.vocab_size, rows), compat.attention_kernels(self._runner.model)
        check_equal(run, taps, ids, kernels, compat.told_by_tensor_ranks)
        return found

    def _check_everything(self) -> dict[str, str]:
        """Check a tap on every tensor that a later point may ask for; return what the residual stream is."""
        stream: dict[str, str] = {}
        for kind in TensorType:
            try:
                group = compat.whole_group(self._config, self._parts, kind)
                taps = self._tap_set((group,), min(self._runner.max_rows, _CHECKED_ROWS))
                try:
                    stream |= self._check(taps)
                finally:
                    taps.remove()
            except CaptureError as exc:
                self._refused[kind.value] = str(exc)
                continue
            self._modes |= {(kind.value, tap.layer): tap.mode for tap in taps.taps}
        return stream

    def _prove_graphs(self) -> None:
        taps = self.set
        sizes = compat.graph_sizes(self._config, self._runner.max_rows)
        for step, rows in enumerate(sizes, start=1):
            taps.arm(step, rows)
            with torch.inference_mode():
                self._runner.dummy_run(np.zeros(rows, np.int32))
            taps.disarm()
            taps.stale(step, rows)
            silent = [tap for tap in taps.taps if not taps.fired(tap, step, rows)]
            if silent:
                first = silent[0]
                raise CaptureError(
                    f"{len(silent)} of {len(taps.taps)} taps did not fire in the compiled model on {rows} rows, the "
                    f"first of them {first.group.tensor_type} of layer {first.layer}: it was compiled without them"
                )
        taps.forget()
