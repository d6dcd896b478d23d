"""What an engine's configuration says: its model, and what capture does not support in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm.config import CompilationMode, VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from undercurrent.adapters.checks import with_token_id
from undercurrent.adapters.model_map import ModelMap
from undercurrent.adapters.vllm.compat.graphs import has_cuda_graphs
from undercurrent.adapters.vllm.compat.parts import row_shapes, why_not
from undercurrent.adapters.vllm.compat.ranks import owned_layers, stage_layers
from undercurrent.adapters.vllm.support import Combination, reasons_against
from undercurrent.capture.points import SHAPED, CapturePoint, TapGroup
from undercurrent.capture.sharding import share_of
from undercurrent.errors import CaptureError
from undercurrent.spec import ExecutionMode, ExtractionPoint, TensorType, parse_position

_COMPILE_MODES = {
    None: "eager",
    CompilationMode.NONE: "eager",
    CompilationMode.STOCK_TORCH_COMPILE: "stock",
    CompilationMode.DYNAMO_TRACE_ONCE: "dynamo",
    CompilationMode.VLLM_COMPILE: "vllm",
}


def combination_of(config: VllmConfig, *, v2_runner: bool) -> Combination:
    """Return how an engine runs.

    Args:
        config: of the engine.
        v2_runner: whether it uses the V2 model runner.
    """
    parallel = config.parallel_config
    sizes = {
        "TP": parallel.tensor_parallel_size,
        "PP": parallel.pipeline_parallel_size,
        "DP": parallel.data_parallel_size,
    }
    return Combination(
        runner="v2" if v2_runner else "v1",
        compile=_compile_mode(config),
        schedule=_schedule(config),
        parallel="+".join(name for name, size in sizes.items() if size > 1) or "1",
    )


def _compile_mode(config: VllmConfig) -> str:
    if has_cuda_graphs(config):
        return "full cudagraphs" if config.compilation_config.cudagraph_mode.has_full_cudagraphs() else "cudagraphs"
    return _COMPILE_MODES[config.compilation_config.mode]


def _schedule(config: VllmConfig) -> str:
    if config.speculative_config is None:
        return "async" if config.scheduler_config.async_scheduling else "sync"
    plain = config.speculative_config.method == "ngram" and not config.scheduler_config.async_scheduling
    return "ngram" if plain else "drafts"


def features_of(config: VllmConfig) -> list[str]:
    """Return what a configuration asks for beside its combination, by the names of the table of support."""
    model, parallel = config.model_config, config.parallel_config
    asked = {
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "micro-batching": parallel.use_ubatching,
        "sequence-parallel MoE": parallel.use_sequence_parallel_moe,
        "pooling models": model.runner_type != "generate",
        "encoder-decoder models": model.is_encoder_decoder,
        "diffusion models": model.is_diffusion,
        "prompt embeddings": model.enable_prompt_embeds,
        "kv_sharing_fast_prefill": config.cache_config.kv_sharing_fast_prefill,
        "KV transfer": config.kv_transfer_config is not None,
        "encoder-cache transfer": config.ec_transfer_config is not None,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def check_supported(config: VllmConfig, *, v2_runner: bool, allow_untested: bool = False) -> None:
    """Refuse a configuration that capture does not support, or that no test has run.

    Args:
        config: of the engine.
        v2_runner: whether it uses the V2 model runner.
        allow_untested: let what no test has run be tried.

    Raises:
        CaptureError: it names every reason.
    """
    combination = combination_of(config, v2_runner=v2_runner)
    reasons = reasons_against(combination, features_of(config), allow_untested=allow_untested)
    if reasons:
        raise CaptureError(f"activations cannot be captured yet with: {'; '.join(reasons)}")


def model_shape(config: VllmConfig) -> tuple[int, int, str]:
    """Return decoder layers, hidden size and the NumPy name of the element type of an engine's model."""
    model = config.model_config
    return (
        model.get_total_num_hidden_layers(),
        model.get_hidden_size(),
        str(model.dtype).removeprefix("torch."),
    )


def capture_points(
    config: VllmConfig, points: Sequence[ExtractionPoint], rank: int | None = None
) -> tuple[CapturePoint, ...]:
    """Return a spec's points as they are captured on an engine's model.

    Args:
        config: of the engine.
        points: from the spec.
        rank: of the pipeline whose part of them is asked for; the whole by default.

    Raises:
        CaptureError: one of them cannot be captured, by name.
    """
    layers, width, dtype = model_shape(config)
    shapes = row_shapes(config)
    for point in points:
        if point.tensor_type in SHAPED and point.tensor_type.value not in shapes:
            kind = point.tensor_type.value
            raise CaptureError(f"point {point.name!r}: tensor_type {kind} is not captured: {why_not(config, kind)}")
    owned = (range(layers),) if rank is None else owned_layers(config)
    shares = [(point, share_of(point, owned, rank or 0)) for point in points]
    return tuple(
        CapturePoint.of(
            with_token_id(point, _encoder(config)),
            layers=layers,
            width=width,
            model_dtype=dtype,
            shapes=shapes,
            share=share,
        )
        for point, share in shares
        # One without layers of the model is refused by name there.
        if share.layers or share.shards == 0
    )


def _encoder(config: VllmConfig) -> Callable[[str], Sequence[int]]:
    """Return how texts become token ids; the tokenizer is loaded only where a point has one."""

    def encode(text: str) -> Sequence[int]:
        tokenizer = cached_tokenizer_from_config(config.model_config)
        if tokenizer is None:
            raise CaptureError("a stop token that is a text needs the tokenizer, which skip_tokenizer_init leaves out")
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return encode


def whole_group(config: VllmConfig, parts: ModelMap, kind: TensorType) -> TapGroup:
    """Return a tap group with every layer that has a tensor type.

    Args:
        config: of the engine.
        parts: of its model.
        kind: which tensor.

    Raises:
        CaptureError: no layer has it; the reason is that of the first.
    """
    layers: list[int] = []
    missing = [CaptureError(f"{kind.value} is read in another pipeline stage")]
    for layer in stage_layers(config, kind):
        try:
            parts.source(kind.value, layer)
            layers.append(layer)
        except CaptureError as exc:
            missing.append(exc)
    if not layers:
        raise missing[min(1, len(missing) - 1)]
    point = ExtractionPoint(kind.value, tuple(layers), kind, parse_position("*"), execution_mode=ExecutionMode.ASYNC)
    return capture_points(config, (point,))[0].group


def seeds_stop_the_engine(config: VllmConfig) -> bool:
    """Whether a sampling seed can stop this engine.

    On a CPU the V1 runner rewinds a seeded generator after each chunk of a prefill, which a CPU generator cannot do:
    the engine core dies with `CPU Generator does not use offset`.
    """
    return config.device_config.device_type == "cpu" and bool(config.scheduler_config.enable_chunked_prefill)
