"""The registry: names in code and from installed packages."""

from __future__ import annotations

import importlib.metadata

import pytest

from tests.unit.undercurrent.core.test_probe import Counting
from undercurrent.core import ProbeFactory, ProbeRegistry, get_probe_factory, list_probes, register_probe
from undercurrent.core import unregister_probe as take_back
from undercurrent.errors import ProbeError, ProbeNotFoundError
from undercurrent.probes.linear import LinearProbe


class Other(Counting):
    """Another class."""


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
    registry.register("linear", Other, replace=True)
    assert registry.get("linear").probe_cls is Other


@pytest.mark.parametrize("value", ["no.such.module:X", "undercurrent.core:Absent", "os:getcwd"])
def test_an_entry_point_that_does_not_load_is_an_error_of_its_own(value):
    registry = ProbeRegistry(lambda: [entry("broken", value)])
    with pytest.raises(ProbeError) as caught:
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
