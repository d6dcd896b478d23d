"""The wheel and the sdist hold what they should, and every command answers from an install of the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = ("undercurrent", "engine_worker", "probe_consumers", "producer", "schemas")
SCRIPTS = sorted(PROJECT["project"]["scripts"])
COMMANDS = ("demo", "broker", "topics", "engine", "probes", "prompts", "replay", "tail")


def run(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in, so that the working tree stays as it is."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=source)
    (found,) = folder.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that has this wheel, and the dependencies of the one that runs the tests."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (folder / "lib").glob("python3*/site-packages")
    # A .pth line adds a folder without reading its own .pth files: the editable install there stays out of sight.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    origin = run(python, "-c", "import undercurrent; print(undercurrent.__file__)", cwd=folder)
    assert Path(origin.strip()).is_relative_to(site)
    return folder / "bin"


def build_wheel(source: Path, folder: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", folder, source, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheels_top_level_is_the_four_packages(wheel: Path) -> None:
    top = {PurePosixPath(name).parts[0] for name in files_of(wheel)}
    version = PROJECT["project"]["version"]
    expected = {"undercurrent", "producer", "engine_worker", "probe_consumers", f"undercurrent-{version}.dist-info"}
    assert top == expected


def test_the_wheel_ships_every_module_and_data_file(wheel: Path) -> None:
    names = files_of(wheel)
    for package in SOURCES:
        for path in (ROOT / package).rglob("*"):
            shipped = path.suffix in (".py", ".avsc", ".typed") or "vault" in path.parts
            if not shipped or path.is_dir() or "__pycache__" in path.parts:
                continue
            name = path.relative_to(ROOT).as_posix()
            name = name.replace("schemas/", "undercurrent/schemas/", 1) if name.startswith("schemas/") else name
            assert name in names
    assert "undercurrent/schemas/README.md" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or "tests" in PurePosixPath(name).parts]


def test_every_package_on_disk_is_declared() -> None:
    declared = set(PROJECT["tool"]["setuptools"]["packages"])
    found = {"undercurrent.schemas"}
    for package in SOURCES[:-1]:
        for path in (ROOT / package).rglob("*.py"):
            found.add(".".join(path.parent.relative_to(ROOT).parts))
    assert found == declared


def test_a_wheel_from_the_sdist_is_the_same(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    folder = tmp_path / "wheel"
    folder.mkdir()
    assert files_of(build_wheel(unpacked, folder)) == files_of(wheel)


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_console_script_answers_help(installed: Path, script: str, tmp_path: Path) -> None:
    assert f"Usage: {script}" in run(installed / script, "--help", cwd=tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_answers_help(installed: Path, command: str, tmp_path: Path) -> None:
    assert f"Usage: undercurrent {command}" in run(installed / "undercurrent", command, "--help", cwd=tmp_path)


def test_the_schemas_are_read_from_the_install(installed: Path, tmp_path: Path) -> None:
    code = "from undercurrent.codec.avro import SCHEMA_NAMES, load_schema; print(*map(load_schema, SCHEMA_NAMES))"
    assert "PromptRequest" in run(installed / "python", "-c", code, cwd=tmp_path)


def test_the_package_says_its_version(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "undercurrent", "--version", cwd=tmp_path).split() == [
        "undercurrent",
        PROJECT["project"]["version"],
    ]


def test_machine_code_is_built_where_there_is_a_compiler(installed: Path) -> None:
    code = (
        "from undercurrent.capture import steady; from undercurrent.probes import scoring; "
        "from undercurrent.codec import blocks; "
        "print(steady.AVAILABLE, scoring.machine_code() is not None, blocks.read_block is not blocks.read_in_python)"
    )
    there = run(installed / "python", "-c", code, cwd=installed).split()
    assert there == [str(shutil.which("cc") is not None)] * 3
