"""The notebook of the first probe, run from top to bottom on a real broker; its last cell says what has to hold."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from undercurrent.testing.brokers import Broker

pytestmark = [pytest.mark.kafka, pytest.mark.alone, pytest.mark.timeout(600)]

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "first_probe.ipynb"


def test_every_cell_runs(apache_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERCURRENT_BOOTSTRAP_SERVERS", apache_broker.bootstrap_servers)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.reads(NOTEBOOK.read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
