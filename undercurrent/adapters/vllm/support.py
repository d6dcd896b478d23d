"""What capture supports, as a table: the engine asks it at start, the documentation is made from it.

A combination of model runner, compile mode, schedule and parallel mode has `passed` a test, is `refused` since its rows
would be wrong or cannot be told apart, or was `not run`. The first row that fits a combination speaks for it. What a
configuration asks for beside these four is a feature, with a row of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields

ANY = "any"


class Status(enum.StrEnum):
    """What is known of something that an engine can be asked for."""

    PASSED = "passed"
    REFUSED = "refused"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Combination:
    """How an engine runs.

    Args:
        runner: `v1` or `v2`.
        compile: `eager`; `dynamo`, as vLLM compiles on a CPU; `vllm`, split and cached as on a GPU; `cudagraphs`, of
            the pieces between attention; `full cudagraphs`, of whole steps; or `stock`, which is torch's own.
        schedule: `sync`, `async`, `ngram`, or `drafts` for any other speculation.
        parallel: `1`, or what is above one of `TP`, `PP`, `DP`, joined by `+`.
    """

    runner: str
    compile: str
    schedule: str
    parallel: str

    def __str__(self) -> str:
        return f"runner {self.runner}, compile mode {self.compile}, schedule {self.schedule}, parallel {self.parallel}"

    def fits(self, other: Combination) -> bool:
        """Whether this one, in which a part may be `any`, stands for another."""
        return all(getattr(self, f.name) in {ANY, getattr(other, f.name)} for f in fields(self))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Args:
        what: a combination, or the name of a feature.
        status: what is known of it.
        detail: the test that passed; the error that is raised; why it was not run.
    """

    what: Combination | str
    status: Status
    detail: str


_TESTS = "tests/integration/vllm"
_ONCE = "test_rows_are_those_of_one_process_and_come_once"
_JOINED = "test_the_rows_of_two_stages_are_joined_into_those_of_one_engine"
_REPLICAS = "data parallelism in one engine (run an engine worker per replica, each with a name of its own)"
_WHOLE_GRAPHS = (
    "CUDA graphs of whole steps, which no check at start replays (set enforce_eager, or cudagraph_mode PIECEWISE)"
)
_MATCH = "test_rows_match_transformers"
_COMPILED = "test_a_compiled_engine_computes_what_one_without_a_compiler_does"
_EIGHT = "test_eight_requests_at_once_match_transformers"


def _row(runner: str, compile_mode: str, schedule: str, parallel: str, status: Status, detail: str) -> Row:
    return Row(Combination(runner, compile_mode, schedule, parallel), status, detail)


COMBINATIONS: tuple[Row, ...] = (
    _row("v1", "eager", "sync", "1", Status.PASSED, f"{_TESTS}/test_parity.py::{_EIGHT}"),
    _row("v1", "eager", "async", "1", Status.PASSED, f"{_TESTS}/test_async_scheduling.py::{_MATCH}"),
    _row("v1", "eager", "ngram", "1", Status.PASSED, f"{_TESTS}/test_speculation.py::{_MATCH}"),
    _row("v2", "eager", "sync", "1", Status.PASSED, f"{_TESTS}/test_runner_v2.py::test_rows_on_v2_match_transformers"),
    _row("v2", "eager", "async", "1", Status.PASSED, f"{_TESTS}/test_runner_v2.py::test_rows_on_v2_match_transformers"),
    _row("v2", ANY, "ngram", ANY, Status.REFUSED, "speculative decoding on the V2 model runner"),
    _row("v2", ANY, "drafts", ANY, Status.REFUSED, "speculative decoding on the V2 model runner"),
    _row(ANY, ANY, "drafts", ANY, Status.REFUSED, "speculative decoding by another method than ngram"),
    _row(ANY, "stock", ANY, ANY, Status.REFUSED, "compilation mode STOCK_TORCH_COMPILE"),
    _row("v1", "eager", "sync", "TP", Status.PASSED, f"{_TESTS}/test_tensor_parallel.py::{_ONCE}"),
    _row("v1", "eager", "sync", "PP", Status.PASSED, f"{_TESTS}/test_pipeline.py::{_JOINED}"),
    _row("v1", "dynamo", "sync", "1", Status.PASSED, f"{_TESTS}/test_compiled.py::{_COMPILED}"),
    _row("v1", "vllm", "sync", "1", Status.PASSED, f"{_TESTS}/test_compiled.py::{_COMPILED}"),
    *(_row(ANY, ANY, ANY, parallel, Status.REFUSED, _REPLICAS) for parallel in ("DP", "TP+DP", "PP+DP", "TP+PP+DP")),
    _row(ANY, "full cudagraphs", ANY, ANY, Status.REFUSED, _WHOLE_GRAPHS),
    _row("v2", "cudagraphs", ANY, ANY, Status.REFUSED, "CUDA graphs on the V2 model runner (set enforce_eager)"),
    _row("v1", "cudagraphs", ANY, ANY, Status.NOT_RUN, "CUDA graphs need a GPU (set enforce_eager)"),
    _row(ANY, ANY, ANY, ANY, Status.NOT_RUN, "no test runs it"),
)
"""The first row that fits a combination speaks for it."""

_SCHEDULES = {
    "chunked prefill": "test_chunks_mixed_steps_and_requests_without_points",
    "preemption": "test_preempted_requests_emit_every_position_once",
    "a cache reset under running requests": "test_running_requests_that_are_reset_emit_every_position_once",
    "prefix caching": "test_a_prefix_from_the_cache_is_a_declared_gap_unless_the_request_reads_none",
    "n above 1": "test_children_are_told_apart_even_from_an_id_that_imitates_one",
    "LoRA": "test_two_adapters_and_the_base_in_one_batch",
    "new weights under running requests": "test_new_weights_end_a_stream_and_the_next_one_says_so",
}
_EVERY = {
    "the V2 runner": "test_runner_v2.py::test_every_tensor_selector_and_encoding_on_v2_is_that_of_v1",
    "asynchronous scheduling": (
        "test_async_scheduling.py::test_every_tensor_selector_and_encoding_a_step_ahead_is_that_of_a_plain_engine"
    ),
    "ngram speculation": (
        "test_speculation.py::test_every_tensor_selector_and_encoding_of_accepted_drafts_is_that_of_a_plain_engine"
    ),
    "two pipeline stages": f"test_pipeline.py::{_JOINED}",
}
_REFUSED = (
    "prefill context parallelism",
    "decode context parallelism",
    "micro-batching",
    "sequence-parallel MoE",
    "pooling models",
    "encoder-decoder models",
    "diffusion models",
    "prompt embeddings",
    "kv_sharing_fast_prefill",
    "KV transfer",
    "encoder-cache transfer",
    "adaptive verification of drafts",
)

FEATURES: tuple[Row, ...] = (
    *(Row(name, Status.PASSED, f"{_TESTS}/test_schedules.py::{test}") for name, test in _SCHEDULES.items()),
    Row(
        "structured outputs and logprobs",
        Status.PASSED,
        f"{_TESTS}/test_speculation.py::test_structured_outputs_and_logprobs_go_on",
    ),
    *(
        Row(f"every tensor type, selector and encoding with {name}", Status.PASSED, f"{_TESTS}/{test}")
        for name, test in _EVERY.items()
    ),
    *(Row(name, Status.REFUSED, name) for name in _REFUSED),
)

_FAMILIES = (
    *("Llama", "GPT-2", "Qwen2", "Qwen3", "Gemma", "Gemma 2", "Gemma 3", "Mixtral", "Qwen2-MoE", "Phi-3", "OLMo-2"),
    *("Cohere", "Exaone4", "StableLM", "PhiMoE", "Falcon", "GPT-NeoX", "SmolVLM, asked in text"),
)
_NO_SCAN = "vLLM's CPU build has no selective scan: '_OpNamespace' '_C' object has no attribute 'selective_scan_fwd'"
MODELS: tuple[Row, ...] = (
    *(
        Row(name, Status.PASSED, f"{_TESTS}/test_families.py::test_every_row_is_what_transformers_computes")
        for name in _FAMILIES
    ),
    Row("Mamba", Status.NOT_RUN, _NO_SCAN),
    Row("Jamba", Status.NOT_RUN, _NO_SCAN),
    Row(
        "LFM2",
        Status.NOT_RUN,
        "vLLM without capture computes something else than transformers here; why is not known",
    ),
    Row("Qwen2.5-VL", Status.NOT_RUN, "its module in vLLM needs torchvision: No module named 'torchvision'"),
)
"""Families of models. Another one starts as well, and the self-check refuses it where its layers are not understood."""


def find(combination: Combination) -> Row:
    """Return the row that speaks for a combination."""
    return next(row for row in COMBINATIONS if isinstance(row.what, Combination) and row.what.fits(combination))


def reasons_against(combination: Combination, features: Collection[str], *, allow_untested: bool = False) -> list[str]:
    """Return why an engine that runs so does not start with capture, empty where it does.

    Args:
        combination: how it runs.
        features: what else it is asked for; those without a row are supported.
        allow_untested: let what no test has run be tried.
    """
    rows = [find(combination), *(row for row in FEATURES if row.what in features)]
    reasons = [row.detail for row in rows if row.status is Status.REFUSED]
    if not allow_untested:
        untested = [row for row in rows if row.status is Status.NOT_RUN]
        reasons += [f"{combination if row.what not in features else row.what}: {row.detail}" for row in untested]
    return reasons


def render(rows: Iterable[Row] = (*COMBINATIONS, *FEATURES, *MODELS)) -> str:
    """Return the table as Markdown: the combinations, then the features and the models."""
    rows = list(rows)
    head = ("runner", "compile mode", "schedule", "parallel", "status", "test, error or reason")
    told = [
        (w.runner, w.compile, w.schedule, w.parallel, r.status, _cell(r))
        for r in rows
        if isinstance(w := r.what, Combination)
    ]
    named = [(r.what, r.status, _cell(r)) for r in rows if isinstance(r.what, str)]
    return (
        "\n\n".join((_table(head, told), _table(("asked for, or model", "status", "test, error or reason"), named)))
        + "\n"
    )


def _cell(row: Row) -> str:
    return row.detail if row.status is Status.NOT_RUN else f"`{row.detail}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
