"""Programs that few tests run import only modules and names of this project that exist."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "examples", "research", "tools")
OURS = {"benchmarks", "research", "sinew", "sinew_client", "sinew_eval", "sinew_perf", "tests", "tools"}


def imported(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, name) for each import of this project's modules, also of those inside functions. The name is
    "" if the module itself is imported."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name, "") for each in node.names if ours(each.name))
        elif isinstance(node, ast.ImportFrom) and not node.level and ours(node.module or ""):
            yield from ((node.lineno, node.module or "", each.name) for each in node.names)


def ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


@cache
def opened(module: str) -> ModuleType | None:
    """Return an imported module. None if it needs a package of others that is not installed here.

    Raises:
        ImportError: The module does not exist, or it imports a name that does not exist.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if ours(error.name or module):
            raise
        return None
    except pytest.skip.Exception:  # a module of tests without its package
        return None


def problem(module: str, name: str) -> str:
    """Return the error of an import; "" if there is none."""
    try:
        found = opened(module)
        if found is not None and name and not hasattr(found, name):
            opened(f"{module}.{name}")
    except ImportError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("folder", FOLDERS)
def test_imported_names_exist(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, module, name in imported(path)
        if (words := problem(module, name))
    ]
    assert wrong == []
