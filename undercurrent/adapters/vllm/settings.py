"""What the driver tells the worker: a JSON file whose path stands in vLLM's `additional_config`.

`additional_config` itself is logged, and hashed into the key of vLLM's compile cache, so nothing stands there but the
tap set, which changes the graph, and this file's path. A worker that has read the file takes the path out before the
model is compiled: where the file lies and what else it says, such as the address of a broker, changes no key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undercurrent.errors import CaptureError, SpecError
from undercurrent.spec import ExtractionPoint, ProbeSpec, parse_dict, probe_spec_to_dict

if TYPE_CHECKING:
    from undercurrent.adapters.vllm.server_settings import ServerConfig

CONFIG_KEY = "undercurrent"
"""Key of ours in `additional_config`, and of an order in a request's `extra_args`."""

SLOT_KEY = "undercurrent.slot"
"""Key in a request's `extra_args` under which an API server says where it tells the request's length."""

LENGTHS_CALL = "undercurrent_lengths"
"""Method of a bare server's workers by which an API server finds the tables of lengths."""

SERVER_SUFFIXES = frozenset({".yaml", ".yml"})
"""How the name of a bare server's file ends; the file that a driver writes for its own engine is JSON."""

DEFAULT_MAX_TAP_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """How a worker captures.

    Args:
        ring: path of the ring.
        more_rings: paths of the rings of further pipeline ranks.
        points: what requests may ask for.
        max_tap_bytes: refuse to start when the tap buffers would need more.
        block_timeout_s: how long a point with `overflow: block` waits for the reader.
        check_plans: verify the cached plan in every step; for tests.
        owner_pid: process with which the engine ends, 0 for none.
        open_points: points may be added while the engine runs.
        server: the file of a bare server, whose worker makes its ring and its publisher itself.
        allow_untested: start in a combination of modes that no test has run, too.
    """

    ring: str
    points: tuple[ExtractionPoint, ...]
    max_tap_bytes: int = DEFAULT_MAX_TAP_BYTES
    block_timeout_s: float = 1.0
    check_plans: bool = False
    owner_pid: int = 0
    open_points: bool = False
    more_rings: tuple[str, ...] = ()
    server: ServerConfig | None = None
    allow_untested: bool = False

    @property
    def rings(self) -> tuple[str, ...]:
        """Paths of the rings, by pipeline rank."""
        return self.ring, *self.more_rings

    def write(self, path: Path) -> None:
        """Write the settings file, readable by this user alone."""
        values = {
            "ring": self.ring,
            "spec": probe_spec_to_dict(ProbeSpec(version=1, extraction_points=self.points)),
            "max_tap_bytes": self.max_tap_bytes,
            "block_timeout_s": self.block_timeout_s,
            "check_plans": self.check_plans,
            "owner_pid": self.owner_pid,
            "open_points": self.open_points,
            "more_rings": list(self.more_rings),
            "allow_untested": self.allow_untested,
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(values, indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> CaptureSettings:
        """Return what a settings file says.

        Args:
            path: of the JSON that a driver writes for its own engine, or of the YAML of a bare server.

        Raises:
            CaptureError: it cannot be read.
            ConfigError: a server's file has a mistake, by its key.
        """
        if path.suffix in SERVER_SUFFIXES:
            # Here, because it reads what this module defines, and a driver's worker needs none of it.
            from undercurrent.adapters.vllm.server_settings import server_capture

            return server_capture(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            points = tuple(parse_dict(values.pop("spec")).extraction_points)
            more = tuple(values.pop("more_rings", ()))
            return cls(points=points, more_rings=more, **values)
        except (OSError, ValueError, KeyError, TypeError, SpecError) as exc:
            raise CaptureError(f"cannot read the capture settings {path}: {exc}") from exc


def tap_set(points: Sequence[ExtractionPoint]) -> str:
    """Return the canonical tap set of some points: equal for equal graphs, whatever the points are called."""
    taps = {(point.tensor_type.value, layer, point.layers) for point in points for layer in point.layers}
    return ";".join(f"{t}/{layer}/{','.join(map(str, group))}" for t, layer, group in sorted(taps))


def additional_config(points: Sequence[ExtractionPoint], settings: Path) -> dict[str, Any]:
    """Return the part of vLLM's `additional_config` that switches capture on.

    Args:
        points: what will be captured.
        settings: path of the settings file.
    """
    return {CONFIG_KEY: {"taps": tap_set(points), "settings": str(settings)}}


def graph_key(additional: object, taps: str) -> dict[str, Any]:
    """Return an `additional_config` that says of capture only what is in the model's graph.

    Args:
        additional: vLLM's `additional_config`.
        taps: everything about the taps that changes the graph.
    """
    others = additional if isinstance(additional, Mapping) else {}
    return {**others, CONFIG_KEY: {"taps": taps}}


def settings_of(additional: object) -> CaptureSettings | None:
    """Return the settings that an `additional_config` points to; None where capture is not asked for.

    Args:
        additional: vLLM's `additional_config`.

    Raises:
        CaptureError: it asks for capture, but not in a way that can be read, or for other taps than its settings.
    """
    if not isinstance(additional, Mapping) or CONFIG_KEY not in additional:
        return None
    ours = additional[CONFIG_KEY]
    if not isinstance(ours, Mapping) or "settings" not in ours or not ours.keys() <= {"taps", "settings"}:
        raise CaptureError(f"additional_config[{CONFIG_KEY!r}] needs `settings`, the path of a file, and nothing else")
    settings = CaptureSettings.read(Path(str(ours["settings"])))
    if "taps" in ours and ours["taps"] != tap_set(settings.points):
        raise CaptureError(
            "additional_config names other taps than the settings file: the compile cache would mix them"
        )
    return settings
