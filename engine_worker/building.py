"""The engine that a configuration names, and the rings that it writes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_worker.config import WorkerConfig
from undercurrent.adapters.base import Engine
from undercurrent.capture.ring import Ring
from undercurrent.cli.options import EngineKind
from undercurrent.errors import ConfigError

PIPELINE_RANKS = "pipeline_parallel_size"


def rings_of(config: WorkerConfig) -> tuple[Ring, ...]:
    """Return the rings that the engine writes to: none without points, else one per pipeline rank.

    Raises:
        ConfigError: the number of ranks is none.
    """
    if not len(config.points):
        return ()
    ranks = config.own.engine.args.get(PIPELINE_RANKS, 1) if config.own.engine.kind is EngineKind.VLLM else 1
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"engine.args.{PIPELINE_RANKS} is {ranks!r:.40}; accepted: a whole number from 1 on")
    section = config.own.publisher
    # The lengths of requests stand in the first one.
    return tuple(
        Ring.create(section.ring_mib << 20, slots=1 if rank else section.request_slots) for rank in range(ranks)
    )


def build_engine(config: WorkerConfig, rings: Sequence[Ring]) -> Engine:
    """Return the engine that the configuration names; it has not started.

    Args:
        config: of the worker.
        rings: see `rings_of`.

    Raises:
        ConfigError: its arguments are wrong.
    """
    section, points = config.own.engine, tuple(config.points)
    ring = rings[0] if rings else None
    options: dict[str, Any] = {"check_plans": section.check_plans, "served_name": section.served_name}
    if section.max_tap_bytes is not None:
        options["max_tap_bytes"] = section.max_tap_bytes
    # Each is imported where it is wanted alone: the others' libraries may not be installed.
    try:
        if section.kind is EngineKind.FAKE:
            from undercurrent.testing.fake_engine import FakeEngine

            return FakeEngine(points=points, ring=ring, **section.args)
        if section.kind is EngineKind.HF:
            from undercurrent.adapters.hf.engine import HFEngine

            return HFEngine(section.model, engine_args=section.args, points=points, ring=ring, **options)
        from undercurrent.adapters.vllm.engine import VLLMEngine

        return VLLMEngine(
            section.model,
            engine_args=section.args,
            points=points,
            ring=ring,
            more_rings=rings[1:],
            nice=section.nice,
            allow_untested=section.allow_untested,
            **options,
        )
    except TypeError as exc:
        raise ConfigError(f"engine.args: {exc}") from exc
    except ModuleNotFoundError as exc:
        raise ConfigError(f"engine.kind {section.kind.value} needs {exc.name}, which is not installed") from exc
