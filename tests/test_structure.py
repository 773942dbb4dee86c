"""The rooms of docs/structure.md: all named there, imports pointing downwards, files of one concept."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sinew"

# A room may import from its own line and from those below. The package itself offers load() lazily.
STOREYS = [
    {"cli"},
    {"eval", "perf"},
    {"opening"},
    {"checks", "serve", "sim"},
    {"stream"},
    {"policy"},
    {"sources"},
    {"vlacpp"},
    {"families"},
    {"presets"},
    {"engine", "convert"},
    {"models"},
    {"layers", "processing", "records"},
    {"bundle"},
    {"steps"},
    {
        "machine",
        "registry",
        "progress",
        "scratch",
        "hints",
        "figures",
        "core",
        "extras",
        "solvers",
        "auth",
        "signals",
        "rate_limited_log",
        "npy",
    },
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem[0] != "_")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Return what a file imports, anywhere in it: modules, and their names as if those were modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def imported_rooms(path: Path) -> set[str]:
    found = {name.split(".")[1] for name in imported_modules(path) if name.startswith("sinew.")}
    return found - {"__version__", "load", "Policy"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    storey = {room: level for level, rooms in enumerate(STOREYS) for room in rooms}
    here = storey[room_of(path)]
    upwards = {room for room in imported_rooms(path) if storey[room] < here}
    assert not upwards


# Within a room: a folder and what it knows nothing of. A folder's own modules are those of no folder in it.
APART = [
    (
        "serve/transport",
        "serve/wires",
    ),  # wires say what they are (serve/wire.py), and are handed to transports
    ("serve/transport", "serve/dashboard"),
    ("serve/decode", "serve/transport"),
    ("serve/decode", "serve/wires"),
    ("serve", "serve/dashboard"),  # it follows the service
    ("serve", "serve/transport"),
    ("serve/dashboard", "serve/wires"),
]


@pytest.mark.parametrize(("folder", "unknown"), APART, ids=lambda name: name.replace("/", "."))
def test_folders_that_know_nothing_of_others(folder: str, unknown: str) -> None:
    files = sorted((PACKAGE / folder).glob("*.py") if folder == "serve" else (PACKAGE / folder).rglob("*.py"))
    assert files
    assert (PACKAGE / unknown).is_dir()
    foreign = f"sinew.{unknown.replace('/', '.')}"
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in files
        for name in imported_modules(path)
        if f"{name}.".startswith(f"{foreign}.")
    }
    assert not found


# What a reader of the core need not meet, and the only files outside that name it: all else finds it by its name
# alone (an engine, a suite, a layout). One distribution has them all, so these walls are what a package would be.
WALLS = {
    "engine/cuda": {"eval/report/quantization.py", "checks/__init__.py"},
    "perf": {"cli"},
    "vlacpp": {"cli/export.py"},
    "sim": {"opening.py", "eval"},
    "eval/suites": {"cli/eval.py", "eval"},
    "eval/foreign": {"cli/eval.py"},
    "serve/dashboard": {"serve/wires/__init__.py"},
    "serve/fleet": {"cli/fleet.py"},
}


@pytest.mark.parametrize("wall", WALLS, ids=lambda wall: wall.replace("/", "."))
def test_walls_have_few_doors(wall: str) -> None:
    behind = f"sinew.{wall.replace('/', '.')}"
    assert (PACKAGE / wall).is_dir()
    found = {
        path.relative_to(PACKAGE)
        for path in FILES
        if not path.is_relative_to(PACKAGE / wall)
        and any(f"{name}.".startswith(f"{behind}.") for name in imported_modules(path))
    }
    doors = {Path(door) for door in WALLS[wall]}
    assert not {path for path in found if not {path, *path.parents} & doors}
    assert not {door for door in doors if not any(door in (path, *path.parents) for path in found)}


@pytest.mark.parametrize(
    "path", [path for path in FILES if room_of(path) not in ("serve", "cli")], ids=lambda path: str(path.name)
)
def test_records_are_read_without_the_server(path: Path) -> None:
    """A recording is a file format: whoever reads one needs no server."""
    # But the server's own choice of batches, and who opens a recording as a policy.
    if path.relative_to(PACKAGE) not in (Path("perf/fleet.py"), Path("opening.py")):
        assert "serve" not in imported_rooms(path)


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


# Folders that import each other, and why that stays.
MUTUAL = {
    (
        "convert",
        "convert/lerobot",
    ): "convert() reads LeRobot's data sets for every family; its readers use what all do",
}


def folder_of(path: Path) -> str:
    return path.parent.relative_to(PACKAGE).as_posix()


def folders() -> dict[str, set[str]]:
    """Return folder -> folders of which any of its files imports something, anywhere in it; the package's own files are
    rooms of their own and are in ``STOREYS``."""
    homes = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        homes[name.removesuffix(".__init__")] = folder_of(path)
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        known = {homes[name] for name in imported_modules(path) if name in homes}
        found.setdefault(folder_of(path), set()).update(known - {folder_of(path), "."})
    found.pop(".")
    return found


def test_folders_import_one_way() -> None:
    known = folders()
    mutual = {(a, b) for a in known for b in known[a] if a < b and a in known.get(b, ())}
    assert mutual == MUTUAL.keys()


def test_folders_are_in_no_circle() -> None:
    """Nor by way of others: apart from the pairs above, they can be built one after the other."""
    known = {
        folder: {other for other in others if tuple(sorted((folder, other))) not in MUTUAL}
        for folder, others in folders().items()
    }
    while free := {folder for folder, others in known.items() if not others & known.keys()}:
        for folder in free:
            del known[folder]
    assert not known, "\n".join(
        f"{folder}: {', '.join(sorted(others & known.keys()))}" for folder, others in known.items()
    )


# Arrows from a room to another that it imports. The number only falls: who needs one more cuts one first.
MOST_ARROWS = 165


def test_rooms_import_few_others() -> None:
    arrows = {(room_of(path), other) for path in FILES for other in imported_rooms(path) - {room_of(path)}}
    assert len(arrows) <= MOST_ARROWS, sorted(arrows)


# Classes of one name: a facade and its protocol, a step of a bundle and one of a solver, one suite's simulator each.
SHARED_NAMES = {"Policy", "Step", "Simulator"}


def test_a_class_has_a_name_of_its_own() -> None:
    client = ROOT / "packages" / "sinew-client" / "src"
    counted = Counter(
        node.name
        for path in (*FILES, *client.rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in counted.items() if count > 1} == SHARED_NAMES


# `perf` has a model of its own for some of them.
ASKS_AN_ENGINE = re.compile(r'[!=]= "(?:eager|plan|onnx)"|(?:get|has)attr\([^,]*engine')


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if room_of(path) not in ("engine", "perf")],
    ids=lambda path: str(path.name),
)
def test_nobody_asks_an_engine_which_one_it_is(path: Path) -> None:
    """What differs between engines is said by their backends and facts."""
    assert not ASKS_AN_ENGINE.findall(path.read_text())
