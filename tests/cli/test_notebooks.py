"""Notebooks of the documentation run from top to bottom."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[str]:
    """Return the sources of a notebook's code cells."""
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_python_and_carry_no_output(path: Path) -> None:
    assert NOTEBOOKS
    for source in cells(path):
        ast.parse(source)
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell in order, in one namespace, as a kernel does; a bare expression at its end is evaluated too."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    space: dict[str, object] = {"__name__": "__main__"}
    for index, source in enumerate(cells(path)):
        exec(compile(source, f"{path.name}[{index}]", "exec"), space)
    matplotlib.pyplot.close("all")
    assert "success True" in capsys.readouterr().out
