"""How the server finds its probes, and that what is wrong with one is said at the start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.openai_server.probes import ReportingLinearProbe, bind
from undercurrent.adapters.base import EngineInfo
from undercurrent.core import ProbeAction
from undercurrent.errors import ConfigError, ProbeError, ProbeNotFoundError
from undercurrent.probes.linear import LinearProbe
from undercurrent.spec import ActivationRecord, ExtractionPoint, ProbeSpec

INFO = EngineInfo(model="m", model_fingerprint="ab" * 32, dtype="float32", layers=4, width=2, max_model_len=9)


def spec(*probe_types: str | None, layer: int = 1) -> ProbeSpec:
    return ProbeSpec(
        extraction_points=[
            ExtractionPoint(f"point{n}", (layer,), "residual_stream", "*", probe_type=probe_type)
            for n, probe_type in enumerate(probe_types)
        ]
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    probe = LinearProbe.from_arrays([1.0, 0.0], 0.5, layer=1, tensor_type="residual_stream", threshold=4.0, name="lin")
    probe.save(tmp_path / "lin")
    (tmp_path / "my_probes.py").write_text(
        "from undercurrent.core import FunctionProbe\n\n"
        "class Mean(FunctionProbe):\n"
        "    probe_name = 'mean'\n"
        "    threshold = 0.5\n"
        "    function = staticmethod(lambda record: float(record.tensor.mean()))\n"
    )
    return tmp_path


def record(token_pos: int, first: float, layer: int = 1) -> ActivationRecord:
    row = np.array([first, 9.0], np.float32)
    return ActivationRecord("r", "point0", layer, token_pos, "residual_stream", row, is_generated=True)


def test_a_linear_probe_tells_the_score_that_its_threshold_is_compared_with(folder: Path) -> None:
    bound = bind(spec("./lin"), folder, {})
    bound.check(INFO)
    probe = bound.registry.get("point0").spawn("r", "point0")
    assert isinstance(probe, ReportingLinearProbe)
    signals = [probe.on_activation(record(pos, first)) for pos, first in enumerate((1.0, 0.0, 3.5, 1.0))]
    said = [(s.action, s.token_pos, s.layer, s.score) for s in signals if s is not None]
    assert said == [
        (ProbeAction.CONTINUE, 0, 1, 1.5),
        (ProbeAction.CONTINUE, 1, 1, 1.5),
        (ProbeAction.ABORT, 2, 1, 4.0),
        (ProbeAction.CONTINUE, 3, 1, 4.0),
    ]
    assert probe.on_activation(record(4, 1.0, layer=2)) is None


def test_a_probe_type_is_what_was_chosen_for_it_or_a_folder_or_a_class_or_a_name(folder: Path) -> None:
    chosen = {"guard": str(folder / "lin")}
    bound = bind(spec("guard", "my_probes:Mean", "guard"), folder, chosen)
    assert bound.names == {"point0": "guard", "point1": "my_probes:Mean", "point2": "guard"}
    assert [point.probe_type for point in bound.points] == ["point0", "point1", "point2"]
    mean = bound.registry.get("point1").spawn("r", "point1")
    signal = mean.on_activation(record(3, 1.0))
    assert signal is not None
    assert (signal.score, signal.token_pos) == (5.0, 3)


def test_instances_of_a_folder_share_their_weights(folder: Path) -> None:
    factory = bind(spec("./lin"), folder, {}).registry.get("point0")
    one, other = factory.spawn("r1", "point0"), factory.spawn("r2", "point0")
    assert one is not other
    assert one.artefact is other.artefact


def test_a_point_without_a_probe_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="point0"):
        bind(spec(None), folder, {})


def test_an_unknown_probe_is_refused(folder: Path) -> None:
    with pytest.raises(ProbeNotFoundError, match="nobody"):
        bind(spec("nobody"), folder, {})


def test_a_chosen_probe_that_no_point_asks_for_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"other.*guard"):
        bind(spec("guard"), folder, {"guard": str(folder / "lin"), "other": "x:Y"})


def test_a_probe_that_was_made_for_another_point_is_refused(folder: Path) -> None:
    probe = LinearProbe.from_arrays(
        [1.0, 0.0], 0.5, layer=1, tensor_type="residual_stream", threshold=4.0, point="other"
    )
    probe.save(folder / "other")
    with pytest.raises(ProbeError, match=r"point0.*other"):
        bind(spec("./other"), folder, {})


def test_a_model_that_the_probe_was_not_made_for_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(ProbeError, match=r"point0.*layer 1"):
        bind(spec("./lin", layer=3), folder, {}).check(INFO)
    wide = EngineInfo(model="m", model_fingerprint="", dtype="float32", layers=4, width=3, max_model_len=9)
    with pytest.raises(ProbeError, match="width"):
        bind(spec("./lin"), folder, {}).check(wide)
