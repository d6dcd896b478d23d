"""`undercurrent validate SPEC...`: extraction points, and what is bound to them, checked before anything runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.running import EXIT_USAGE, complain, exit_code
from undercurrent.cli.tables import write_table
from undercurrent.errors import CaptureError, ConfigError, ProbingError, SpecError, SpecValidationError

if TYPE_CHECKING:
    from undercurrent.probes import Binding, LoadedProbe
    from undercurrent.spec import ExtractionPoint, ProbeSpec

app = typer.Typer(add_completion=False)

PROG_NAME = "undercurrent validate"


@app.command()
def validate(
    specs: Annotated[list[Path], typer.Argument(metavar="SPEC...", help="Files of extraction points.")],
    probes: Annotated[
        Path | None,
        typer.Option("--probes", help="A file of bindings: the points that it names are there, its probes load."),
    ] = None,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Refuse what a pipeline cannot honour, too; implied by --probes.")
    ] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON line a file instead of tables.")] = False,
) -> int:
    """Check files of extraction points; say of each that it is right, or file, point and field of what is wrong.

    Every file is checked, whatever the one before was like. The exit code is 2 if a spec or a binding is wrong, 1 if a
    probe does not load. Nothing is started, and no broker is asked.
    """
    code, points, complete = 0, dict[str, "ExtractionPoint"](), True
    for path in specs:
        try:
            spec = _read(path, pipeline=pipeline or probes is not None)
        except SpecError as exc:
            _report_error(path, exc, json_lines)
            code, complete = EXIT_USAGE, False
            continue
        points |= {point.name: point for point in spec}
        _report_spec(path, spec, json_lines)
    if probes is not None:
        # Where a spec is wrong nobody knows its points.
        found = _check_probes(probes, points if complete else None, json_lines)
        code = code or found
    return code


def _read(path: Path, *, pipeline: bool) -> ProbeSpec:
    from undercurrent.capture.projection import projection_of
    from undercurrent.spec import check_pipeline, load_yaml_file

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeprecationWarning)
        spec = load_yaml_file(path)
    for warning in caught:
        complain(PROG_NAME, f"{path}: {warning.message}")
    if pipeline:
        try:
            check_pipeline(spec)
        except SpecValidationError as exc:
            raise SpecValidationError(f"{path}: {exc}") from exc
    for point in spec:
        try:
            projection_of(point, None)
        except CaptureError as exc:
            raise SpecValidationError(f"{path}: {exc}") from exc
    return spec


def _check_probes(path: Path, points: Mapping[str, ExtractionPoint] | None, json_lines: bool) -> int:
    from undercurrent.probes import load_binding, load_bindings

    try:
        bindings = load_bindings(path)
    except ProbingError as exc:
        _report_error(path, exc, json_lines)
        return exit_code(exc)
    code, rows = 0, []
    for binding in bindings:
        try:
            loaded = load_binding(binding, base=path.parent)
            if points is not None:
                _check_fit(binding, loaded, points)
        except ProbingError as exc:
            _report_error(path, exc, json_lines)
            code = code or exit_code(exc)
            continue
        rows.append(_binding_row(binding, loaded))
    if code == 0:
        _report(path, "bindings", rows, json_lines)
    return code


def _check_fit(binding: Binding, loaded: LoadedProbe, points: Mapping[str, ExtractionPoint]) -> None:
    """Refuse a binding of a point that is not there, or of a stored probe that was fitted on something else.

    Raises:
        ConfigError: naming the binding and the field.
    """
    from undercurrent.core import StreamFacts
    from undercurrent.probes import TrajectoryProbe

    binding.check_points(points)
    if not isinstance(loaded.sample, TrajectoryProbe):
        return
    # Rows of several points are shown as those of the first layer of the first.
    point = points[binding.sources[0]]
    # Width and fingerprints are the model's, which nobody knows here: what the probe was fitted on stands in for them.
    artefact = loaded.sample.artefact
    facts = StreamFacts(
        prompt_len=0,
        layers=point.layers[:1] if binding.points else point.layers,
        width=artefact.width,
        tensor_type=point.tensor_type.value,
        model_fingerprint=artefact.config.fingerprints.model or "",
        lora=artefact.config.fingerprints.lora or "",
    )
    try:
        loaded.check(facts)
    except ProbingError as exc:
        raise ConfigError(f"binding {binding.name!r}: field 'point': {binding.point!r}: {exc}") from exc


def _report_spec(path: Path, spec: ProbeSpec, json_lines: bool) -> None:
    if json_lines:
        from undercurrent.spec import extraction_point_to_dict

        _write_json({"file": str(path), "ok": True, "points": [extraction_point_to_dict(point) for point in spec]})
        return
    _report(path, "points", [_point_row(point) for point in spec], json_lines)


def _report(path: Path, what: str, rows: list[dict[str, Any]], json_lines: bool) -> None:
    if json_lines:
        _write_json({"file": str(path), "ok": True, what: rows})
        return
    sys.stdout.write(f"{path}: ok, {len(rows)} {what if len(rows) != 1 else what.removesuffix('s')}\n")
    write_table(rows)


def _report_error(path: Path, error: ProbingError, json_lines: bool) -> None:
    message = str(error)
    if not json_lines:
        complain(PROG_NAME, message if message.startswith(str(path)) else f"{path}: {message}")
        return
    place = {name: getattr(error, name, None) for name in ("point", "field")}
    _write_json({"file": str(path), "ok": False, **place, "error": message.removeprefix(f"{path}: ")})


def _write_json(value: dict[str, Any]) -> None:
    from undercurrent.cli.jsonl import dumps

    sys.stdout.write(dumps(value) + "\n")


def _point_row(point: ExtractionPoint) -> dict[str, Any]:
    every = f" every {point.stride}" if point.stride != 1 else ""
    until = point.until
    ends = "" if until.count is None and until.stop_token is None else f" until {until.count or until.stop_token!r}"
    return {
        "point": point.name,
        "layers": ",".join(map(str, point.layers)),
        "tensor_type": point.tensor_type.value,
        "position": f"{point.position.to_raw()}{every}{ends}",
        "mode": point.execution_mode.value,
        "kind": str(point.probe_kind),
        "probe": point.probe_type or "-",
        "in a pipeline": _pipeline_word(point),
    }


def _pipeline_word(point: ExtractionPoint) -> str:
    from undercurrent.spec import ProbeSpec, check_pipeline

    try:
        check_pipeline(ProbeSpec(1, [point]))
    except SpecValidationError as exc:
        return f"no: {exc.field}"
    return "yes"


def _binding_row(binding: Binding, loaded: LoadedProbe) -> dict[str, Any]:
    return {
        "binding": binding.name,
        "point": binding.point,
        "probe": binding.probe,
        "mode": binding.mode,
        "version": loaded.version or "-",
        "fingerprint": loaded.fingerprint[:12],
    }
