"""For our tests and for users' tests.

    from undercurrent.testing import drive, make_records

    driven = drive(MyProbe, make_records(rows, layers=[12], prompt_len=4))
    assert driven.first_action.token_pos == 7

builders.py       records, contexts, points and streams from plain arrays
driving.py        one probe on one request's records: signals, scores, result
memory_ring.py    probe hosts on topics in memory: messages in, verdicts and abort commands out
streams.py        one stream, message by message
fake_engine.py, brokers.py, cut_proxy.py, probe_bench.py, engine_bench.py, tiny_models.py   parts of a real pipeline

The names below are imported when they are first used: a test of a probe needs neither torch nor a broker.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undercurrent.testing.builders import make_context, make_point, make_record, make_records, stream_messages
    from undercurrent.testing.driving import Driven, assert_block_invariant, drive
    from undercurrent.testing.memory_ring import MemoryRing
    from undercurrent.testing.memory_topics import MemoryTopics
    from undercurrent.testing.streams import StreamBuilder

__all__ = [
    "Driven",
    "MemoryRing",
    "MemoryTopics",
    "StreamBuilder",
    "assert_block_invariant",
    "drive",
    "make_context",
    "make_point",
    "make_record",
    "make_records",
    "stream_messages",
]

_MODULES = {
    "builders": ("make_context", "make_point", "make_record", "make_records", "stream_messages"),
    "driving": ("Driven", "assert_block_invariant", "drive"),
    "memory_ring": ("MemoryRing",),
    "memory_topics": ("MemoryTopics",),
    "streams": ("StreamBuilder",),
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the public names
    """Import a public name where it is first used."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names too, those that nobody has used yet included."""
    return sorted({*globals(), *__all__})
