"""From a binding's `probe:` to a factory of instances: a folder, `module:Class`, or a registered name."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undercurrent.core import BatchProbe, Probe, ProbeFactory, ProbeRegistry, StreamFacts, default_registry
from undercurrent.errors import ConfigError, ProbeError
from undercurrent.probes.bindings import Binding
from undercurrent.probes.ensemble import EnsembleProbe
from undercurrent.probes.folder import read_config
from undercurrent.probes.linear import LinearProbe
from undercurrent.probes.stored import AttentionProbe, MahalanobisProbe, MeanDifferenceProbe, MlpProbe, StoredProbe
from undercurrent.probes.trajectory import TrajectoryProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedProbe:
    """A probe that is ready to run.

    Args:
        factory: makes one instance per stream.
        sample: an instance that judges no stream, with the same settings; its `score` serves all streams.
        version: of the probe; empty where it states none.
        fingerprint: SHA-256 over the probe and its settings, hex: equal ones give equal verdicts.
        point: the point that it was made for, where it is for one only.
    """

    factory: ProbeFactory
    sample: Probe
    version: str = ""
    fingerprint: str
    point: str | None = None

    @property
    def batch(self) -> BatchProbe | None:
        """The sample as a batch probe, where rows of many streams can be scored with one call."""
        return self.sample if isinstance(self.sample, BatchProbe) else None

    def check(self, stream: StreamFacts) -> None:
        """Refuse a stream that the probe cannot judge; probes without a `check` take any.

        Raises:
            ProbeError: the probe refuses it, and why.
        """
        check = getattr(self.sample, "check", None)
        if callable(check):
            check(stream)


def load_probe(
    reference: str,
    args: Mapping[str, Any] | None = None,
    *,
    base: str | Path = ".",
    registry: ProbeRegistry = default_registry,
) -> LoadedProbe:
    """Return the probe that a reference names.

    Args:
        reference: a folder (it has a path separator, begins with a dot, or is there), `module:Class`, or a name.
        args: settings for the probe.
        base: folder that relative paths start from, and from which `module` can be imported too.
        registry: where names are looked up.

    Raises:
        ProbeNotFoundError: no probe has this name.
        ProbeError: it does not load, or does not take the settings.
    """
    settings = dict(args or {})
    folder = Path(base) / Path(reference).expanduser()
    if "/" in reference or reference.startswith(".") or folder.is_dir():
        return _loaded(lambda: class_of_folder(folder).factory(folder=folder, **settings), reference)
    if ":" in reference:
        cls = _import_class(reference, Path(base))
        return _loaded(lambda: cls.factory(**settings), reference)
    known = registry.get(reference)
    merged = dict(known.probe_kwargs) | settings
    return _loaded(lambda: known.probe_cls.factory(**merged), reference)


def loaded_probe(probe: TrajectoryProbe) -> LoadedProbe:
    """Return a stored probe that was made or opened by hand, ready to run.

    Raises:
        ProbeError: it cannot be run.
    """
    name = probe.artefact.config.name
    return _loaded(lambda: type(probe).factory(artefact=probe.artefact), name)


def load_binding(
    binding: Binding, *, base: str | Path = ".", registry: ProbeRegistry = default_registry
) -> LoadedProbe:
    """Return the probe of a binding.

    Raises:
        ProbeError: it does not load; the error names the binding.
        ConfigError: it was made for another point.
    """
    try:
        loaded = load_probe(binding.probe, binding.args, base=base, registry=registry)
    except ProbeError as exc:
        raise type(exc)(f"binding {binding.name!r}: {exc}") from exc
    if loaded.point is not None and loaded.point != binding.point:
        raise ConfigError(
            f"binding {binding.name!r}: field 'point': {binding.point!r}, but its probe was made for {loaded.point!r}"
        )
    return loaded


def class_of_folder(folder: Path) -> type[LinearProbe | StoredProbe]:
    """Return the class of the probe in a folder, by its format.

    Raises:
        ProbeError: there is no folder, or its settings are wrong.
    """
    config = read_config(folder)
    classes: tuple[type[StoredProbe], ...] = (
        MlpProbe,
        MeanDifferenceProbe,
        MahalanobisProbe,
        EnsembleProbe,
        AttentionProbe,
    )
    return next((cls for cls in classes if cls.format == config.format), LinearProbe)


def _loaded(make: Callable[[], ProbeFactory], reference: str) -> LoadedProbe:
    # The trial instance finds wrong settings at start rather than at the first request.
    try:
        factory = make()
        sample = factory.spawn("", "")
    except (TypeError, ValueError, OSError) as exc:
        raise ProbeError(f"probe {reference!r} does not take these settings: {exc}") from exc
    except ProbeError:
        raise
    except (Exception, SystemExit) as exc:  # as for its module
        raise ProbeError(f"probe {reference!r} cannot be made: {type(exc).__name__}: {exc}") from exc
    config = sample.artefact.config if isinstance(sample, TrajectoryProbe) else None
    return LoadedProbe(
        factory=factory,
        sample=sample,
        version=config.version if config else str(getattr(sample, "version", "")),
        fingerprint=sample.fingerprint if isinstance(sample, TrajectoryProbe) else _code_fingerprint(factory),
        point=config.point if config else None,
    )


def _code_fingerprint(factory: ProbeFactory) -> str:
    """Return the SHA-256 over the source file of a class, its name and its settings."""
    cls = factory.probe_cls
    function = getattr(cls, "function", None)
    try:
        path = inspect.getsourcefile(function or cls)
        source = Path(path).read_bytes() if path else b""
    except (OSError, TypeError):  # defined in a shell, or in a compiled module
        source = b""
    named = json.dumps(
        [cls.__module__, cls.__qualname__, dict(factory.probe_kwargs)], sort_keys=True, default=repr, allow_nan=True
    )
    return hashlib.sha256(source + b"\0" + named.encode()).hexdigest()


def _import_class(reference: str, base: Path) -> type[Probe]:
    module_name, _, name = reference.partition(":")
    try:
        with _importable(base):
            found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError, SyntaxError) as exc:
        raise ProbeError(f"probe {reference!r}: cannot be imported: {exc}") from exc
    except (Exception, SystemExit) as exc:  # somebody's module may do anything, also end the process without a word
        raise ProbeError(f"probe {reference!r}: cannot be imported: {type(exc).__name__}: {exc}") from exc
    if not isinstance(found, type) or not issubclass(found, Probe):
        raise ProbeError(f"probe {reference!r}: {name} is a {type(found).__name__}; accepted: a subclass of Probe")
    return found


@contextmanager
def _importable(base: Path) -> Iterator[None]:
    """Let modules beside the binding list be imported, after everything that is installed."""
    folder = str(base.resolve())
    if folder in sys.path:  # `remove` would take the entry that was there before
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
