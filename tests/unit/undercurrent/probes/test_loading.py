"""Loading probes by folder, module and name."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from undercurrent.core import ProbeRegistry, StreamFacts
from undercurrent.errors import ConfigError, ProbeError, ProbeNotFoundError
from undercurrent.probes import Binding, LinearProbe, load_binding, load_probe
from undercurrent.probes.folder import ENSEMBLE, FORMATS
from undercurrent.probes.loading import class_of_folder

SETTINGS = {"layer": 2, "tensor_type": "attn_out", "threshold": 0.5, "version": "7", "point": "mid"}
SOURCE = """
from undercurrent.core import Probe, ProbeResult, probe

class Watcher(Probe):
    version = "3"
    def __init__(self, words=(), loud=False):
        self.loud = loud
    def on_activation(self, record):
        return None
    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, "seen")

class Picky(Watcher):
    def __init__(self):
        raise ValueError("not today")

def helper():
    pass
"""


@pytest.fixture
def base(tmp_path):
    LinearProbe.from_arrays(np.ones(4), 0.0, **SETTINGS).save(tmp_path / "vault")
    (tmp_path / "loading_watchers.py").write_text(SOURCE, encoding="utf-8")
    before = list(sys.path)
    yield tmp_path
    assert sys.path == before
    sys.modules.pop("loading_watchers", None)


@pytest.mark.parametrize("reference", ["vault", "./vault", "{base}/vault"])
def test_a_folder_is_found_from_the_binding_list(base, reference):
    loaded = load_probe(reference.format(base=base), base=base)
    assert (loaded.version, loaded.point) == ("7", "mid")
    assert loaded.fingerprint == LinearProbe.from_folder(base / "vault").fingerprint
    assert loaded.batch is loaded.sample
    instance = loaded.factory.spawn("r1", "mid")
    assert instance.artefact is loaded.sample.artefact
    with pytest.raises(ProbeError, match="width"):
        loaded.check(StreamFacts(prompt_len=1, layers=(2,), width=9, tensor_type="attn_out"))


def test_args_may_change_the_threshold_and_so_the_fingerprint(base):
    plain, strict = load_probe("vault", base=base), load_probe("vault", {"threshold": 0.9}, base=base)
    assert strict.sample.artefact.config.threshold == 0.9
    assert strict.fingerprint != plain.fingerprint


def test_a_class_is_imported_from_beside_the_binding_list(base):
    loaded = load_probe("loading_watchers:Watcher", {"loud": True}, base=base)
    assert loaded.factory.spawn("r1", "mid").loud is True
    assert (loaded.batch, loaded.version, loaded.point) == (None, "3", None)
    loaded.check(StreamFacts(prompt_len=1, layers=(2,), width=9, tensor_type="kv"))
    other = load_probe("loading_watchers:Watcher", {"loud": False}, base=base)
    again = load_probe("loading_watchers:Watcher", {"loud": True}, base=base)
    assert loaded.fingerprint == again.fingerprint != other.fingerprint


def test_a_folder_that_could_be_imported_from_already_keeps_its_place(base, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(base.resolve()), *sys.path])
    before = list(sys.path)
    load_probe("loading_watchers:Watcher", base=base)
    assert sys.path == before
    monkeypatch.undo()


def test_a_registered_name_takes_args_over_its_own_settings(base):
    registry = ProbeRegistry()
    assert load_probe("linear", {"folder": str(base / "vault")}, registry=registry).version == "7"
    cls = load_probe("loading_watchers:Watcher", base=base).factory.probe_cls
    registry.register("watch", cls, {"loud": True})
    assert load_probe("watch", registry=registry).sample.loud is True
    assert load_probe("watch", {"loud": False}, registry=registry).sample.loud is False


@pytest.mark.parametrize(
    ("reference", "args", "words"),
    [
        ("./absent", {}, "is no folder"),
        ("vault", {"colour": "red"}, "does not take these settings.*colour"),
        ("vault", {"threshold": "high"}, "threshold"),
        ("no_such_module_here:X", {}, "cannot be imported"),
        ("loading_watchers:Absent", {}, "cannot be imported.*Absent"),
        ("loading_watchers:helper", {}, "is a function; accepted: a subclass of Probe"),
        ("loading_watchers:Watcher", {"volume": 3}, "does not take these settings.*volume"),
        ("loading_watchers:Picky", {}, "not today"),
        (":", {}, "cannot be imported"),
        ("linear", {}, "needs its folder"),
    ],
)
def test_what_does_not_load_says_why(base, reference, args, words):
    with pytest.raises(ProbeError, match=words):
        load_probe(reference, args, base=base)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise RuntimeError('at import')", "cannot be imported: RuntimeError: at import"),
        ("import sys; sys.exit(0)", "cannot be imported: SystemExit: 0"),
        ("class X(Probe):\n    seen = {}", "cannot be imported: TypeError: X.seen is a mutable class attribute"),
        (
            "class X(Probe):\n    def __init__(self):\n        raise RuntimeError('made')\n"
            "    def on_activation(self, record): ...\n    def on_end(self, ctx): ...",
            "cannot be made: RuntimeError: made",
        ),
    ],
)
def test_a_module_that_does_anything_else_than_define_a_probe_is_named(base, source, words):
    (base / "loading_wild.py").write_text(f"from undercurrent.core import Probe\n{source}\n", encoding="utf-8")
    try:
        with pytest.raises(ProbeError, match=rf"probe 'loading_wild:X'.*{words}"):
            load_probe("loading_wild:X", base=base)
    finally:
        sys.modules.pop("loading_wild", None)


def test_an_unknown_name_is_not_found(base):
    with pytest.raises(ProbeNotFoundError, match=r"'vualt'.*known: .*linear"):
        load_probe("vualt", base=base)


def test_a_binding_is_named_and_its_point_compared(base):
    assert load_binding(Binding(name="g", point="mid", probe="vault"), base=base).version == "7"
    with pytest.raises(ConfigError, match=r"binding 'g'.*'late'.*'mid'"):
        load_binding(Binding(name="g", point="late", probe="vault"), base=base)
    with pytest.raises(ProbeNotFoundError, match="binding 'g'"):
        load_binding(Binding(name="g", point="mid", probe="vualt"), base=base)


def test_every_ready_made_probe_has_a_name(tmp_path):
    """As the package offers them; the classes are those that folders load."""
    pyproject = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    named = pyproject["project"]["entry-points"]["undercurrent.probes"]
    entries = [EntryPoint(name, target, "undercurrent.probes") for name, target in named.items()]
    registry = ProbeRegistry(entry_points=lambda: entries)
    offered = {registry.get(name).probe_cls: name for name in registry.names()}
    for form in FORMATS:
        extra = {"layers": [1]} if form == ENSEMBLE else {"layer": 1}
        config = {"format": form, "name": "p", "tensor_type": "residual_stream", "threshold": 1.0, **extra}
        (tmp_path / "probe.json").write_text(json.dumps(config))
        cls = class_of_folder(tmp_path)
        assert offered.pop(cls) == form.removeprefix("undercurrent.").removesuffix("/1").replace("_", "-")
    assert not offered
