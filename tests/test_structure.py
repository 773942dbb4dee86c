"""The rooms of docs/structure.md: all named there, imports pointing downwards, files of one concept."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.request_cost import loaded
from tests.structure import MUTUAL, ROOT, WALLS, Structure, imported_modules, imported_rooms

# A room may import from its own line and from those below. The package itself offers load() lazily.
STOREYS = [
    {"cli"},
    {"eval", "perf"},
    {"checks", "serve", "sim"},
    {"stream"},
    {"policy"},
    {"vlacpp"},
    {"families"},
    {"presets"},
    {"engine", "convert"},
    {"models"},
    {"layers", "processing", "records"},
    {"bundle"},
    {"steps"},
    {"core"},
]
STRUCTURE = Structure()
PACKAGE, FILES, room_of = STRUCTURE.package, STRUCTURE.files, STRUCTURE.room_of


def test_imports_point_downwards() -> None:
    storey = {room: level for level, rooms in enumerate(STOREYS) for room in rooms}
    upwards = {
        f"{path.relative_to(PACKAGE)}: {room}"
        for path in FILES
        for room in imported_rooms(path)
        if storey[room] < storey[room_of(path)]
    }
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


@pytest.mark.parametrize("wall", WALLS, ids=lambda wall: wall.replace("/", "."))
def test_walls_have_few_doors(wall: str) -> None:
    assert (PACKAGE / wall).is_dir() or (PACKAGE / wall).with_suffix(".py").is_file()
    found = {Path(name) for name in STRUCTURE.importers(wall)}
    doors = {Path(door) for door in WALLS[wall]}
    assert not {path for path in found if not {path, *path.parents} & doors}
    assert not {door for door in doors if not any(door in (path, *path.parents) for path in found)}


# Who names an engine beside the files of its folder: what only it can say. The reference and its rewrites are what
# other engines are made of.
ENGINES = {
    "cpu": {
        *("engine/backend.py", "engine/loading.py", "serve/prepare.py"),
        *("checks/__init__.py", "eval/quantize/quantization.py"),
    },
    "cuda": {"checks/__init__.py", "eval/quantize/quantization.py"},
    "onnx": {
        *(
            "engine/cpu/backend.py",
            "checks/__init__.py",
            "eval/quantize/quantization.py",
        ),
        *("cli/export.py", "eval/preparing.py", "serve/prepare.py"),
    },
}


def test_an_engine_is_its_folder() -> None:
    found = STRUCTURE.engines()
    assert found.keys() == {*ENGINES, "eager", "plan"}
    assert {name: found[name] for name in ENGINES} == ENGINES


# What knows a step by its name beside the converters that write it: everything else asks the step itself.
STEPS = {
    # The arithmetic that planes share with it, and its compiled form.
    "steps/image/bilinear": {"processing/image.py", "engine/cpu/kernels/frame_kernels.py"},
    "steps/image/compiled": {"engine/cpu/kernels/frame_kernels.py", "engine/cpu/kernels/library.py"},
    "steps/image/jpeg": {"engine/cpu/kernels/frame_kernels.py"},
    "steps/image/resample": {"engine/cpu/kernels/frame_kernels.py"},
    "steps/image/tensorflow": {"engine/cpu/kernels/frame_kernels.py"},
    "steps/image/letterbox": {"engine/cuda/kernels/resize_tables.py"},
}


def test_a_step_is_its_file() -> None:
    assert STRUCTURE.steps() == STEPS


def test_storage_exchanges_no_class() -> None:
    """How a weight lies is its layer's store; the methods of a layer are a rewrite's to change. And a package is called
    as a function only where its class is another."""
    assert STRUCTURE.exchanged_classes() == {"core/called.py", "engine/plan/rewrite.py"}


# Who names the server beside itself and the verbs: its own choice of batches.
SERVED = {"perf/fleet.py"}


def test_records_are_read_without_the_server() -> None:
    """A recording is a file format: whoever reads one needs no server."""
    others = [path for path in FILES if room_of(path) not in ("serve", "cli")]
    found = {str(path.relative_to(PACKAGE)) for path in others if "serve" in imported_rooms(path)}
    assert found == SERVED


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


def test_folders_import_one_way() -> None:
    assert STRUCTURE.mutual() == MUTUAL.keys()


def test_folders_are_in_no_circle() -> None:
    """Nor by way of others: apart from the pairs above, they can be built one after the other."""
    found = STRUCTURE.circles()
    assert not found, "\n".join(f"{folder}: {', '.join(sorted(others))}" for folder, others in found.items())


# Arrows from a room to another that it imports, of all and of those of the core. The numbers only fall: who needs one
# more cuts one first.
MOST_ARROWS, MOST_CORE_ARROWS = 92, 69


def test_rooms_import_few_others() -> None:
    for files, most in ((FILES, MOST_ARROWS), (STRUCTURE.core, MOST_CORE_ARROWS)):
        arrows = STRUCTURE.arrows(files)
        assert len(arrows) <= most, sorted(arrows)


# Lines of the core that are not blank. The number only falls, but for what a release says that it brings.
MOST_CORE_LINES = 39_750


def test_the_core_stays_as_small_as_it_is() -> None:
    assert STRUCTURE.lines(STRUCTURE.core) <= MOST_CORE_LINES


# What is read of a load, file by file, in the order of its calls (``benchmarks/request_cost.py --load --files``). The
# numbers only fall.
MOST_LOADED = {"files": 18, "stays": 27, "returns": 9}


def test_a_load_is_read_in_few_files() -> None:
    found = loaded(ROOT)
    assert found["files"] > 10
    assert not {what: found[what] for what, most in MOST_LOADED.items() if found[what] > most}


# Classes of one name: a facade and its protocol, one suite's simulator each.
SHARED_NAMES = {"Policy", "Simulator"}


def test_a_class_has_a_name_of_its_own() -> None:
    assert STRUCTURE.shared_names() == SHARED_NAMES


def test_nobody_asks_an_engine_which_one_it_is() -> None:
    """What differs between engines is said by their backends and facts."""
    assert not STRUCTURE.asked_engines()


def test_the_table_is_printed() -> None:
    """``python -m tests.structure`` has a line for each number that the tests above hold."""
    found = STRUCTURE.table()
    assert all(found.values())
    assert found["folders that import each other"] == str(len(MUTUAL))
    assert found["places that ask an engine its name"] == found["folders in circles"] == "0"
    assert sum(STRUCTURE.rooms().values()) == STRUCTURE.lines(STRUCTURE.core)
