"""Runs one engine after the other in a process of its own, as one that starts with a warm or a cold compile cache does.

python compiled_run.py '[{"mode": "vllm", "model": FOLDER, "out": FOLDER, "taps": true}, ...]'

Beside the taps an op of this test's own keeps what the same modules gave in the same run: a record must equal it bit
for bit. Written per run: `rows.npz`, the rows of each request and point, and `said.json`, everything else. With
`"unnamed": true` the taps are not named in the key of the compile cache, as if nobody had thought of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from compiling import keep_vllm_compile
from harness import ALL, LAYERS, point
from inprocess import Ask, Capturing, Ran

from undercurrent.adapters.vllm import checked_taps, runtime
from undercurrent.adapters.vllm.checked_taps import CheckedTaps
from undercurrent.errors import CaptureError

POINTS = (
    point("residual", "residual_stream", ALL),
    point("attention", "attn_out", ALL),
    point("mlp", "mlp_out", (1, 3)),
    point("norm", "final_norm", (LAYERS,)),
    point("entering", "layer_input", (0, 2)),
    point("kv", "kv", ALL),
)
ASKS = (
    Ask("short", [1, 2, 3, 4, 5], params={"max_tokens": 12}),
    Ask("chunked", list(range(5, 95)), after=1),
    Ask("uncaptured", [9, 8, 7], points=(), params={"max_tokens": 20}),
    Ask("later", list(range(200, 230)), after=6),
)
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "dynamo": {"enforce_eager": False},
    "vllm": {"enforce_eager": False, "compilation_config": {"compile_sizes": [4]}},
}
COUNTERS = (
    "num_backend_compilations",
    "num_inductor_compiles",
    "num_aot_compiles",
    "num_aot_artifacts_loaded",
)
BESIDE = 1000
"""Keys from here on: two tensors side by side, not their sum."""


class Dump:
    """Keeps what modules give, by the engine's step, through an op that a compiler keeps as well."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        self.step = lambda: 0
        self._library = torch.library.Library("undercurrent_test", "DEF")
        self._library.define("dump(Tensor x, Tensor? r, int key, Tensor(a!) sink) -> ()")
        self._library.impl("dump", self._keep, "CompositeExplicitAutograd")
        self._library.impl("dump", lambda *_: None, "Meta")

    def _keep(self, x: torch.Tensor, r: torch.Tensor | None, key: int, sink: torch.Tensor) -> None:
        if r is None:
            self.seen[self.step(), key] = x.clone()
        else:
            beside = key >= BESIDE
            self.seen[self.step(), key] = torch.cat([x.flatten(1), r.flatten(1)], dim=1) if beside else x + r

    def watch(self, taps: CheckedTaps) -> None:
        """Lay hooks of the test's own over the modules that are tapped."""
        op, sink = torch.ops.undercurrent_test.dump.default, torch.zeros(1)
        for tap in taps.set.taps:
            source, key = tap.source, tap.slot + (BESIDE if tap.group.tensor_type == "kv" else 0)
            if source.inputs:
                source.module.register_forward_pre_hook(_of_inputs(op, sink, key, source.inputs), with_kwargs=True)
            else:
                source.module.register_forward_hook(_of_output(op, sink, key, tap.group.tensor_type))


def _of_output(op: Any, sink: torch.Tensor, key: int, kind: str) -> Any:
    summed = kind == "residual_stream"

    def hook(_module: Any, _args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        op(first, output[1] if summed else None, key, sink)

    return hook


def _of_inputs(op: Any, sink: torch.Tensor, key: int, names: tuple[str, ...]) -> Any:
    # Of a Llama: forward(positions, hidden_states, residual), and forward(query, key, value) of its attention.
    def hook(_module: Any, args: Any, kwargs: Any) -> None:
        x, r = (kwargs[name] if name in kwargs else args[place] for place, name in enumerate(names, start=1))
        op(x, r, key, sink)

    return hook


def differing_rows(runs: dict[str, Ran], dump: Dump, taps: CheckedTaps) -> dict[str, int]:
    """Return per point how many rows are not, bit for bit and in its step, a row of the dump that is theirs alone."""
    groups = {p.name: (p.tensor_type.value, p.layers) for p in POINTS}
    slots = {(t.group.tensor_type, t.group.layers, t.layer): t.slot for t in taps.set.taps}
    wrong = dict.fromkeys(groups, 0)
    taken: set[tuple[str, int, int]] = set()
    for run in runs.values():
        for name, stream in run.streams.items():
            kind, layers = groups[name]
            for step, row in zip(stream.steps, stream.rows, strict=True):
                dumps = [dump.seen[step, slots[kind, layers, n] + (BESIDE if kind == "kv" else 0)] for n in layers]
                table = torch.stack(dumps, dim=1).flatten(1).numpy()
                same = [i for i in range(len(table)) if np.array_equal(table[i], row.reshape(-1))]
                free = [i for i in same if (name, step, i) not in taken]
                if free:
                    taken.add((name, step, free[0]))
                wrong[name] += not free
    return wrong


def run(asked: dict[str, Any], dump: Dump) -> None:
    from vllm.compilation.counter import compilation_counter

    out = Path(asked["out"])
    out.mkdir()
    before = {name: getattr(compilation_counter, name) for name in COUNTERS}
    before_compiling = CheckedTaps.before_compiling

    def dumped(taps: CheckedTaps) -> None:
        before_compiling(taps)
        dump.watch(taps)

    with ExitStack() as stack:
        stack.enter_context(keep_vllm_compile() if asked["mode"] == "vllm" else nullcontext())
        stack.enter_context(mock.patch.object(CheckedTaps, "before_compiling", dumped))
        if asked.get("unnamed"):
            for module in (runtime, checked_taps):
                stack.enter_context(mock.patch.object(module, "graph_key", return_value={}))
        tempfile.tempdir = str(out)
        points = POINTS if asked["taps"] else ()
        engine = stack.enter_context(Capturing(asked["model"], points, capture=asked["taps"], **MODES[asked["mode"]]))
        capture = getattr(engine.worker, "_undercurrent_capture", None)
        if capture is not None:
            dump.step = lambda: capture._step
        runs = engine.run(ASKS)
        config = engine.worker.vllm_config
        said = {
            "cache": config.compilation_config.local_cache_dir,
            "additional_config": config.additional_config,
            "compiled": {name: getattr(compilation_counter, name) - before[name] for name in COUNTERS},
            "tokens": {name: ran.sequence for name, ran in runs.items()},
            "positions": {f"{n}/{p}": s.positions for n, ran in runs.items() for p, s in ran.streams.items()},
            "losses": sum(len(s.losses) for ran in runs.values() for s in ran.streams.values()),
            "report": capture.report if capture else {},
            "differing": differing_rows(runs, dump, capture.taps) if capture else {},
        }
        rows = {f"{n}/{p}": np.stack(s.rows) for n, ran in runs.items() for p, s in ran.streams.items()}
    np.savez(out / "rows.npz", **rows)
    (out / "said.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    the_dump = Dump()
    for one in json.loads(sys.argv[1]):
        try:
            run(one, the_dump)
        except CaptureError as refused:
            (Path(one["out"]) / "said.json").write_text(json.dumps({"refused": str(refused)}), encoding="utf-8")
