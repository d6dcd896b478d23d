"""The base class of probes, and what makes fresh instances of them.

One instance judges one request at one point. It is made by `spawn`, told of the start, fed in order, and asked for
its result exactly once, however the request ended. State belongs on the instance: a mutable class attribute would be
shared by all requests of a process, so it is refused where the class is defined.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Self

from undercurrent.core.results import ProbeResult, ProbeSignal, RequestContext
from undercurrent.errors import ProbeError
from undercurrent.spec import ActivationRecord, ProbeKind

_COPIED = (MutableSequence, MutableMapping, MutableSet, tuple)


class Probe(ABC):
    """Judges one request at one point.

    A subclass takes its settings in `__init__`, keeps its state on the instance, and may raise: that ends it for this
    request alone.
    """

    probe_kind: ClassVar[ProbeKind] = ProbeKind.TRAJECTORY

    _request_id: str | None = None
    _extraction_point_name: str | None = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Refuse state that all instances would share.

        Raises:
            TypeError: a class attribute is mutable.
        """
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if not _is_dunder(name) and _is_mutable(value):
                raise TypeError(
                    f"{cls.__qualname__}.{name} is a mutable class attribute ({type(value).__name__}), which all "
                    f"requests would share: set it in __init__, or make it a tuple or frozenset"
                )

    @classmethod
    def spawn(cls, request_id: str, extraction_point_name: str, **kwargs: object) -> Self:
        """Return a fresh instance for one request at one point.

        Args:
            request_id: the producer's id.
            extraction_point_name: the point whose records it will see.
            **kwargs: settings for the constructor.
        """
        instance = cls(**kwargs)
        instance._request_id = request_id
        instance._extraction_point_name = extraction_point_name
        return instance

    @classmethod
    def factory(cls, **kwargs: object) -> ProbeFactory:
        """Return a factory with these settings. Probes that load files override it, to load them once."""
        return ProbeFactory(cls, kwargs)

    @property
    def request_id(self) -> str:
        """The producer's id.

        Raises:
            RuntimeError: the instance was not spawned.
        """
        if self._request_id is None:
            raise RuntimeError(f"this {type(self).__qualname__} belongs to no request: make it with spawn()")
        return self._request_id

    @property
    def extraction_point_name(self) -> str:
        """The point whose records it sees.

        Raises:
            RuntimeError: the instance was not spawned.
        """
        if self._extraction_point_name is None:
            raise RuntimeError(f"this {type(self).__qualname__} belongs to no point: make it with spawn()")
        return self._extraction_point_name

    def on_start(self, ctx: RequestContext) -> None:  # noqa: B027 - most probes need nothing here
        """Hear that the request starts; comes before the first record."""

    @abstractmethod
    def on_activation(self, record: ActivationRecord) -> ProbeSignal | None:
        """Judge one (token, layer). The record's tensor is read-only and valid only during this call."""

    @abstractmethod
    def on_end(self, ctx: RequestContext) -> ProbeResult:
        """Return the result; comes exactly once, also where the request was aborted or lost."""


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_mutable(value: object) -> bool:
    if isinstance(value, MappingProxyType):  # a read-only view, though it has no hash before Python 3.12
        return False
    if isinstance(value, tuple):
        return any(_is_mutable(item) for item in value)
    if isinstance(value, type):
        return False
    # By Python's own convention a type whose values change has no hash: list, dict, set, bytearray, deque, ndarray.
    # A torch tensor has one, but its items can be set.
    return type(value).__hash__ is None or isinstance(value, MutableSet) or hasattr(type(value), "__setitem__")


@dataclass(frozen=True, slots=True)
class ProbeFactory:
    """Makes fresh instances of one probe with fixed settings.

    Args:
        probe_cls: the probe.
        probe_kwargs: settings for its constructor; lists, dicts, sets and tuples are copied for each instance, with all
            that is in them. Anything else, such as an array of weights, is shared.

    Raises:
        ProbeError: the class is no probe.
    """

    probe_cls: type[Probe]
    probe_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.probe_cls, type) or not issubclass(self.probe_cls, Probe):
            raise ProbeError(f"{self.probe_cls!r:.80} is no subclass of Probe")
        object.__setattr__(self, "probe_kwargs", dict(self.probe_kwargs or {}))

    def spawn(self, request_id: str, extraction_point_name: str, **extra: object) -> Probe:
        """Return a fresh instance.

        Args:
            request_id: the producer's id.
            extraction_point_name: the point whose records it will see.
            **extra: settings that come before the factory's own.
        """
        merged = dict(self.probe_kwargs) | extra
        fresh = {key: copy.deepcopy(value) if isinstance(value, _COPIED) else value for key, value in merged.items()}
        return self.probe_cls.spawn(request_id, extraction_point_name, **fresh)
