"""The registry: names in code and from installed packages."""

from __future__ import annotations

import importlib.metadata
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.undercurrent.core.test_probe import Counting
from undercurrent.core import ProbeFactory, ProbeRegistry, get_probe_factory, list_probes, register_probe
from undercurrent.core import unregister_probe as take_back
from undercurrent.errors import ProbeError, ProbeNotFoundError
from undercurrent.probes.linear import LinearProbe


class Other(Counting):
    """Another class."""


NINE = ProbeFactory(Counting, {"limit": 9})


def entry(name, value):
    return importlib.metadata.EntryPoint(name, value, "undercurrent.probes")


def test_a_registered_class_comes_back_as_a_factory_with_its_settings():
    registry = ProbeRegistry(entry_points=list)
    registry.register("counting", Counting, {"limit": 7})
    assert registry.get("counting").spawn("r", "p").limit == 7
    assert registry.names() == ["counting"]
    assert "counting" in registry
    registry.unregister("counting")
    with pytest.raises(ProbeNotFoundError, match="known: none"):
        registry.get("counting")


def test_a_taken_name_is_refused_unless_replaced_or_the_same_class_again():
    registry = ProbeRegistry(entry_points=list)
    registry.register("counting", Counting)
    registry.register("counting", ProbeFactory(Counting, {"limit": 9}))
    with pytest.raises(ProbeError, match="taken by Counting"):
        registry.register("counting", Other)
    registry.register("counting", Other, replace=True)
    assert registry.get("counting").probe_cls is Other


@pytest.mark.parametrize(("name", "cls", "kwargs"), [("", Counting, None), (3, Counting, None), ("x", int, None),
                                                     ("x", ProbeFactory(Counting), {"limit": 1})])  # fmt: skip
def test_what_is_no_registration_is_refused(name, cls, kwargs):
    with pytest.raises(ProbeError):
        ProbeRegistry(entry_points=list).register(name, cls, kwargs)


def test_unknown_names_list_the_known_ones():
    registry = ProbeRegistry(entry_points=lambda: [entry("linear", "undercurrent.probes.linear:LinearProbe")])
    registry.register("counting", Counting)
    with pytest.raises(ProbeNotFoundError, match="'liner'; known: counting, linear"):
        registry.get("liner")
    with pytest.raises(ProbeNotFoundError):
        registry.unregister("linear")


def test_entry_points_load_when_asked_for_and_code_comes_first():
    asked = []

    def entry_points():
        asked.append(1)
        return [entry("linear", "undercurrent.probes.linear:LinearProbe")]

    registry = ProbeRegistry(entry_points)
    assert not asked
    assert registry.get("linear").probe_cls is LinearProbe
    registry.register("linear", Other)
    assert registry.get("linear").probe_cls is Other
    registry.unregister("linear")
    assert registry.get("linear").probe_cls is LinearProbe
    assert len(asked) == 1


@pytest.mark.parametrize("asked_before", [False, True])
def test_an_installed_name_is_not_registered_whoever_asked_before(asked_before):
    registry = ProbeRegistry(lambda: [entry("linear", "undercurrent.probes.linear:LinearProbe")])
    if asked_before:
        registry.get("linear")
    with pytest.raises(ProbeNotFoundError):
        registry.unregister("linear")
    assert registry.register("linear", Other).probe_cls is Other


def test_an_entry_point_may_name_a_factory():
    registry = ProbeRegistry(lambda: [entry("nine", f"{__name__}:NINE")])
    assert registry.get("nine").spawn("r", "p").limit == 9


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no.such.module:X", "ModuleNotFoundError"),
        ("undercurrent.core:Absent", "AttributeError"),
        ("os:getcwd", "no subclass of Probe"),
        ("broken_syntax:X", "SyntaxError"),
        ("broken_import:X", "ZeroDivisionError"),
        ("broken_exit:X", "SystemExit"),
    ],
)
def test_an_entry_point_that_does_not_load_is_an_error_of_its_own(value, words, tmp_path, monkeypatch):
    (tmp_path / "broken_syntax.py").write_text("class")
    (tmp_path / "broken_import.py").write_text("1 / 0")
    (tmp_path / "broken_exit.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    registry = ProbeRegistry(lambda: [entry("broken", value)])
    with pytest.raises(ProbeError, match=f"'broken': entry point '{value}'.*{words}") as caught:
        registry.get("broken")
    assert not isinstance(caught.value, ProbeNotFoundError)


def test_the_default_registry_knows_what_is_installed():
    register_probe("counting-default", Counting)
    try:
        assert {"linear", "counting-default"} <= set(list_probes())
        assert get_probe_factory("linear").probe_cls is LinearProbe
    finally:
        take_back("counting-default")
    assert "counting-default" not in list_probes()


def test_a_class_may_be_registered_by_a_decorator():
    @register_probe("counting-decorated", probe_kwargs={"limit": 4})
    class Decorated(Counting):
        pass

    try:
        factory = get_probe_factory("counting-decorated")
        assert (factory.probe_cls, factory.spawn("r", "p").limit) == (Decorated, 4)
    finally:
        take_back("counting-decorated")


def test_many_threads_may_register_and_ask():
    registry = ProbeRegistry(entry_points=list)

    def work(number):
        for _ in range(50):
            registry.register(f"p{number}", Counting)
            assert registry.get(f"p{number}").probe_cls is Counting
            registry.names()
            registry.unregister(f"p{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8), timeout=60))
    assert registry.names() == []
