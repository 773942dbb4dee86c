"""The rooms of docs/structure.md: all named there, imports pointing downwards, files of one concept."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sinew"

# A room may import from its own line and from those below. The package itself offers load() lazily.
STOREYS = [
    {"cli"},
    {"eval", "perf"},
    {"checks", "presets", "serve", "sim", "validate"},
    {"stream"},
    {"policy"},
    {"sources"},
    {"engine", "convert", "guidance"},
    {"models"},
    {"layers", "processing"},
    {"bundle"},
    {"machine", "progress", "scratch", "hints", "figures", "core", "solvers", "keys", "signals"},
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem[0] != "_")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "sinew":
            names = [f"sinew.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("sinew.")}
    return found - {"__version__", "load", "Policy"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    storey = {room: level for level, rooms in enumerate(STOREYS) for room in rooms}
    here = storey[room_of(path)]
    upwards = {room for room in imported_rooms(path) if storey[room] < here}
    assert not upwards


def test_every_room_is_described() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    for room in {room_of(path) for path in FILES}:
        assert f"`sinew/{room}/`" in text or f"`sinew/{room}.py`" in text


def test_the_client_is_written_in_python_3_8() -> None:
    """Robots run old distributions. Newer syntax fails here; newer names of the library are ruff's to find."""
    files = sorted((ROOT / "packages").rglob("*.py"))
    assert files
    for path in files:
        ast.parse(path.read_text(), str(path), feature_version=(3, 8))
    with pytest.raises(SyntaxError):
        ast.parse("match x:\n    case 1: pass", feature_version=(3, 8))
