"""Notebooks of the documentation run from top to bottom, and show what they give."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools.notebooks import NOTEBOOKS, code_cells, execute

CLOCK = re.compile(r"[\d.]+ ms")
KB = 40  # maximum size of a notebook with its pictures


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_python_and_were_run_in_order(path: Path) -> None:
    notebook = json.loads(path.read_text())
    cells = code_cells(notebook)
    assert cells
    assert (notebook["nbformat"], [cell["execution_count"] for cell in cells]) == (
        4,
        [*range(1, len(cells) + 1)],
    )
    for cell in cells:
        ast.parse("".join(cell["source"]))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert {"stream", "execute_result", "display_data"} <= set(kinds)
    assert path.stat().st_size < KB * 1000


def plain(outputs: list[dict[str, Any]]) -> list[Any]:
    """Return the part of the outputs that is the same on every machine: text without times, and the types of other
    outputs.
    """
    return [
        CLOCK.sub("ms", "".join(each["text"])) if each["output_type"] == "stream" else sorted(each["data"])
        for each in outputs
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_what_it_shows(path: Path) -> None:
    """If this test fails, run `python -m tools.notebooks`, which stores the outputs again."""
    pytest.importorskip("matplotlib")
    cells = code_cells(json.loads(path.read_text()))
    found = execute(cells)
    assert [plain(each) for each in found] == [plain(cell["outputs"]) for cell in cells]
    assert any("success True" in line for each in found for line in plain(each))
