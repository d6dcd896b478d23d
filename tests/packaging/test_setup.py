"""scripts/setup.sh: what it asks pip for, in which order, and what it says when the machine lacks something.

It runs on machines made of shell scripts: their `python` makes a virtual environment whose `python` writes down what it
is called with, so nothing is downloaded and every kind of failure can be had.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "sh", "cat", "chmod", "cksum", "dirname", "grep", "mkdir", "rm", "sed")
INDEX = "https://example.invalid/whl/cpu"

# Makes a .venv like the real thing's outside; says no where a file of that name lies beside it.
PYTHON = """\
#!/bin/sh
here={machine}
case "$*" in
"-c import sys;"*) test ! -e "$here/python-is-old" ;;
"-c import venv,"*) test ! -e "$here/no-venv" ;;
"--version") echo "Python 3.11.99" ;;
"-m venv "*)
    mkdir -p "$3/bin"
    echo "VIRTUAL_ENV=$PWD/$3" >"$3/bin/activate"
    cat "$here/venv-python" >"$3/bin/python"
    chmod +x "$3/bin/python"
    echo venv >>"$here/calls" ;;
*) exit 9 ;;
esac
"""

VENV_PYTHON = """\
#!/bin/sh
here={machine}
case "$*" in
"-m pip --version") exit 0 ;;
*torch-cpu.lock*--index-url*|*--index-url*torch-cpu.lock*) name=torch-from-index ;;
*torch-cpu.lock*) name=torch ;;
*requirements/*) name=$(echo "$*" | sed 's/.*requirements.//') ;;
*--editable*) name=project ;;
*) name="$*" ;;
esac
echo "$name" >>"$here/calls"
if test -e "$here/fail-$name"; then echo "ERROR: no $name"; exit 1; fi
"""


class Machine:
    """A machine and a checkout on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.checkout = folder / "checkout"
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)
        self.script("uname", "#!/bin/sh\necho Linux\n")
        self.script("python3.11", PYTHON.replace("{machine}", str(folder)))
        (folder / "venv-python").write_text(VENV_PYTHON.replace("{machine}", str(folder)))
        for name in ("scripts", "requirements"):
            shutil.copytree(ROOT / name, self.checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        for source in ROOT.glob("undercurrent/*/*.c"):
            target = self.checkout / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)

    def script(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def has(self, name: str) -> None:
        """Make a fact true that the scripts look for."""
        (self.folder / name).touch()

    def setup(self, checkout: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        script = (checkout or self.checkout) / "scripts" / "setup.sh"
        variables = {"PATH": str(self.bin), "TORCH_INDEX": INDEX, **environment}
        return subprocess.run([script], env=variables, capture_output=True, text=True, timeout=60, check=False)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


def test_torch_comes_first_then_the_lock_then_the_project(machine: Machine) -> None:
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.calls() == ["venv", "torch", "cpu.lock", "project"]


def test_a_second_run_does_nothing(machine: Machine) -> None:
    machine.setup()
    done = machine.setup()
    assert done.returncode == 0
    assert machine.calls() == []
    assert done.stdout == ""


@pytest.mark.parametrize(
    "name",
    ["requirements/cpu.lock", "requirements/torch-cpu.lock", "pyproject.toml", "undercurrent/capture/_steady.c"],
)
def test_a_changed_lock_source_or_project_is_installed_into_the_same_environment(machine: Machine, name: str) -> None:
    machine.setup()
    with (machine.checkout / name).open("a") as file:
        file.write("# changed\n")
    machine.setup()
    assert machine.calls() == ["torch", "cpu.lock", "project"]


def test_without_torch_in_pips_reach_the_index_is_asked(machine: Machine) -> None:
    machine.has("fail-torch")
    done = machine.setup()
    assert done.returncode == 0
    assert machine.calls() == ["venv", "torch", "torch-from-index", "cpu.lock", "project"]
    assert INDEX in done.stdout


def test_without_torch_anywhere_one_line_says_what_to_do(machine: Machine) -> None:
    machine.has("fail-torch")
    machine.has("fail-torch-from-index")
    line = only_line(machine.setup())
    assert re.search(r"torch==\S+\+cpu", line)
    assert INDEX in line
    assert "TORCH_INDEX" in line
    assert "PIP_FIND_LINKS" in line


def test_a_set_up_that_failed_is_taken_up_again(machine: Machine) -> None:
    machine.has("fail-cpu.lock")
    assert "ERROR: no cpu.lock" in only_line(machine.setup())
    (machine.folder / "fail-cpu.lock").unlink()
    assert machine.setup().returncode == 0
    assert machine.calls() == ["torch", "cpu.lock", "project"]


def test_a_lock_that_was_tried_in_between_leaves_nothing_behind(machine: Machine) -> None:
    machine.setup()
    lock = machine.checkout / "requirements" / "cpu.lock"
    before = lock.read_text()
    lock.write_text(before + "# changed\n")
    machine.has("fail-cpu.lock")
    assert machine.setup().returncode == 1
    (machine.folder / "fail-cpu.lock").unlink()
    lock.write_text(before)
    machine.setup()
    assert machine.calls() == ["torch", "cpu.lock", "project"]


def test_with_an_nvidia_gpu_the_other_lock_is_taken(machine: Machine) -> None:
    machine.script("nvidia-smi", "#!/bin/sh\necho 'GPU 0'\n")
    assert machine.setup().returncode == 0
    assert machine.calls() == ["venv", "gpu.lock", "project"]
    assert machine.setup(ACCELERATOR="cpu").returncode == 0
    assert machine.calls() == ["torch", "cpu.lock", "project"]


def test_a_driver_that_answers_with_an_error_is_no_gpu(machine: Machine) -> None:
    machine.script("nvidia-smi", "#!/bin/sh\nexit 9\n")
    machine.setup()
    assert "cpu.lock" in machine.calls()


def test_a_moved_checkout_gets_a_new_environment(machine: Machine) -> None:
    machine.setup()
    moved = machine.folder / "moved"
    machine.checkout.rename(moved)
    machine.setup(checkout=moved)
    assert machine.calls() == ["venv", "torch", "cpu.lock", "project"]


def test_an_old_python_is_refused_with_a_way_out(machine: Machine) -> None:
    machine.has("python-is-old")
    line = only_line(machine.setup())
    assert "3.11 or newer" in line
    assert "make setup PYTHON=" in line
    assert "python3.11 is not" in only_line(machine.setup(PYTHON="python3.11"))


def test_a_machine_without_python_is_told_how_to_get_one(machine: Machine) -> None:
    (machine.bin / "python3.11").unlink()
    assert "apt install python3.11" in only_line(machine.setup())


def test_a_python_without_venv_is_told_which_package_has_it(machine: Machine) -> None:
    machine.has("no-venv")
    line = only_line(machine.setup())
    assert "no venv module" in line
    assert "apt install python3-venv" in line


def test_another_system_than_linux_is_told_where_to_go(machine: Machine) -> None:
    machine.script("uname", "#!/bin/sh\necho Darwin\n")
    line = only_line(machine.setup())
    assert "Darwin" in line
    assert "docker compose" in line


def test_an_unknown_accelerator_is_refused(machine: Machine) -> None:
    assert "none of auto, cpu, gpu" in only_line(machine.setup(ACCELERATOR="tpu"))
