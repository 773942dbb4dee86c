"""Run the notebooks of the documentation and store their outputs: ``python -m tools.notebooks``.

Each cell runs in order in one namespace, as in a notebook kernel. Pictures are small and have few colours, because a
browser shows them before anybody runs a cell. ``tools/tests/test_notebooks.py`` compares the stored outputs with a
new run.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "docs" / "notebooks").glob("*.ipynb"))
DPI, COLOURS = 50, 64


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Run code cells. Returns the outputs of each cell in format 4 of notebooks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    space: dict[str, Any] = {"__name__": "__main__"}
    found = []
    for number, cell in enumerate(cells, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = _run("".join(cell["source"]), f"cell {number}", space)
        outputs: list[dict[str, Any]] = []
        if text := printed.getvalue():
            outputs.append(
                {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            )
        if value is not None:
            data = {"text/plain": repr(value).splitlines(keepends=True)}
            if page := getattr(value, "_repr_html_", None):
                data["text/html"] = page().splitlines(keepends=True)
            outputs.append(
                {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
            )
        for each in pyplot.get_fignums():
            data = {"image/png": _picture(pyplot.figure(each)), "text/plain": ["<Figure>"]}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        pyplot.close("all")
        found.append(outputs)
    return found


def _run(source: str, name: str, space: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last line. None if this line is a statement or ends with a semicolon."""
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body and not source.rstrip().endswith(";") else None
    if isinstance(last, ast.Expr):
        del tree.body[-1]
    exec(compile(tree, name, "exec"), space)
    return (
        eval(compile(ast.Expression(last.value), name, "eval"), space) if isinstance(last, ast.Expr) else None
    )


def _picture(figure: Any) -> str:
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=DPI, bbox_inches="tight")
    Image.open(drawn).convert("RGB").quantize(
        COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    ).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        cells = code_cells(notebook)
        for number, (cell, outputs) in enumerate(zip(cells, execute(cells), strict=True), 1):
            cell |= {"outputs": outputs, "execution_count": number}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(path, path.stat().st_size, file=sys.stderr)


if __name__ == "__main__":
    main()
