"""Probes by name: registered in code, or offered by an installed package.

A package offers a probe through the entry-point group `undercurrent.probes`; its value names a `Probe` subclass or a
`ProbeFactory`. Entry points are looked up when a name is first asked for, never at import.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from threading import RLock
from typing import Any, TypeVar, overload

from undercurrent.core.probe import Probe, ProbeFactory
from undercurrent.errors import ProbeError, ProbeNotFoundError

ENTRY_POINT_GROUP = "undercurrent.probes"

EntryPoints = Callable[[], Iterable[importlib.metadata.EntryPoint]]
P = TypeVar("P", bound=type[Probe])


def _installed() -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


class ProbeRegistry:
    """Maps names to factories; safe to use from several threads.

    Args:
        entry_points: gives what installed packages offer.
    """

    def __init__(self, entry_points: EntryPoints = _installed) -> None:
        self._factories: dict[str, ProbeFactory] = {}
        self._loaded: dict[str, ProbeFactory] = {}
        self._entry_points = entry_points
        self._lock = RLock()

    def register(
        self,
        name: str,
        probe: type[Probe] | ProbeFactory,
        probe_kwargs: Mapping[str, Any] | None = None,
        *,
        replace: bool = False,
    ) -> ProbeFactory:
        """Give a probe a name.

        Args:
            name: what specs and bindings call it.
            probe: the class or a factory.
            probe_kwargs: settings for the class's constructor.
            replace: let it take the place of another probe. The same class may always be registered again.

        Raises:
            ProbeError: the name is empty or taken, or this is no probe.
        """
        if not isinstance(name, str) or not name.strip():
            raise ProbeError(f"probe name {name!r:.60}; accepted: a text")
        if isinstance(probe, ProbeFactory) and probe_kwargs:
            raise ProbeError(f"probe {name!r}: a factory has its settings already")
        factory = probe if isinstance(probe, ProbeFactory) else ProbeFactory(probe, probe_kwargs or {})
        with self._lock:
            known = self._factories.get(name)
            if known is not None and not replace and not _same_class(known.probe_cls, factory.probe_cls):
                raise ProbeError(f"probe name {name!r} is taken by {known.probe_cls.__qualname__}")
            self._factories[name] = factory
        return factory

    def unregister(self, name: str) -> None:
        """Take a name back.

        Raises:
            ProbeNotFoundError: nothing was registered under it.
        """
        with self._lock:
            if self._factories.pop(name, None) is None:
                raise ProbeNotFoundError(self._unknown(name))

    def get(self, name: str) -> ProbeFactory:
        """Return the factory of that name; what was registered in code comes before entry points.

        Raises:
            ProbeNotFoundError: there is none.
            ProbeError: an entry point has this name and does not load.
        """
        with self._lock:
            factory = self._factories.get(name) or self._loaded.get(name)
            if factory is None:
                # Kept apart from what code registered: whether a name is free must not depend on who asked before.
                factory = self._loaded[name] = self._load(name)
            return factory

    def _load(self, name: str) -> ProbeFactory:
        entry = next((entry for entry in self._entry_points() if entry.name == name), None)
        if entry is None:
            raise ProbeNotFoundError(self._unknown(name))
        try:
            loaded = entry.load()
        except (Exception, SystemExit) as exc:  # somebody's module may do anything while it is imported
            reason = f"{type(exc).__name__}: {exc}"
            raise ProbeError(f"probe {name!r}: entry point {entry.value!r} does not load: {reason}") from exc
        try:
            return loaded if isinstance(loaded, ProbeFactory) else ProbeFactory(loaded)
        except ProbeError as exc:
            raise ProbeError(f"probe {name!r}: entry point {entry.value!r}: {exc}") from exc

    def names(self) -> list[str]:
        """Return every name that `get` knows, sorted."""
        with self._lock:
            return sorted(self._factories.keys() | {entry.name for entry in self._entry_points()})

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def _unknown(self, name: str) -> str:
        return f"no probe is called {name!r:.60}; known: {', '.join(self.names()) or 'none'}"


def _same_class(known: type[Probe], new: type[Probe]) -> bool:
    # A module that is imported again defines the same class anew.
    return (known.__module__, known.__qualname__) == (new.__module__, new.__qualname__)


default_registry = ProbeRegistry()
"""What the functions below and the `probe` decorator use."""


@overload
def register_probe(
    name: str,
    probe: type[Probe] | ProbeFactory,
    probe_kwargs: Mapping[str, Any] | None = None,
    *,
    replace: bool = False,
) -> ProbeFactory: ...


@overload
def register_probe(
    name: str, *, probe_kwargs: Mapping[str, Any] | None = None, replace: bool = False
) -> Callable[[P], P]: ...


def register_probe(
    name: str,
    probe: type[Probe] | ProbeFactory | None = None,
    probe_kwargs: Mapping[str, Any] | None = None,
    *,
    replace: bool = False,
) -> ProbeFactory | Callable[[P], P]:
    """Give a probe a name in the default registry; see `ProbeRegistry.register`.

    Without a probe it is a decorator: `@register_probe("toxicity")` above the class.
    """
    if probe is not None:
        return default_registry.register(name, probe, probe_kwargs, replace=replace)

    def decorate(cls: P) -> P:
        default_registry.register(name, cls, probe_kwargs, replace=replace)
        return cls

    return decorate


def unregister_probe(name: str) -> None:
    """Take a name back from the default registry; see `ProbeRegistry.unregister`."""
    default_registry.unregister(name)


def get_probe_factory(name: str) -> ProbeFactory:
    """Return a factory of the default registry; see `ProbeRegistry.get`."""
    return default_registry.get(name)


def list_probes() -> list[str]:
    """Return every name that the default registry knows, sorted."""
    return default_registry.names()
