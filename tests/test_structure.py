"""The directions of imports: between distributions, between folders of `sinew`, and inside some folders.

`python -m tools.structure` prints the sizes. No test limits them.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tools.structure import (
    ADDRESSES,
    JOURNEY,
    NAMES_AN_ENGINE,
    PROBES_A_ROBOT,
    PROBES_AN_ENGINE,
    ROBOT_FACTS,
    ROOT,
    Structure,
    imported_names,
    tree,
)

STRUCTURE = Structure()
PACKAGE, FILES, room_of = STRUCTURE.package, STRUCTURE.files, STRUCTURE.room_of


def test_a_distribution_imports_only_those_below_it() -> None:
    assert STRUCTURE.upwards() == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert STRUCTURE.circles() == []


def test_the_closure_holds_every_module_that_is_imported() -> None:
    """The reported size of "convert, load, serve, drive" has to be true: Python itself imports nothing more."""
    imports = "; ".join(f"import {name}" for name in JOURNEY)
    show = "import sys; print(*(n for n in sys.modules if n.partition('.')[0] in ('sinew', 'sinew_client')))"
    command = [sys.executable, "-c", f"{imports}; {show}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    imported = {name for name in done.stdout.split() if not name.endswith("_pb2")}
    assert len(imported) > 100
    assert imported - STRUCTURE.closure() == set()


# Programs that hand an arm or a take-over to a run.
HANDS_AN_ARM = ("sinew.cli.", "sinew_ros.")


def test_only_programs_import_the_arm() -> None:
    """A loop without a take-over imports nothing of kinematics, leaders, take-over and assist, not even for types."""
    importers = {
        name
        for name in STRUCTURE.homes
        for each in STRUCTURE.imports(name)
        if each.startswith("sinew_client.arm")
    }
    others = {name for name in importers if not name.startswith(("sinew_client.arm", *HANDS_AN_ARM))}
    assert importers
    assert others == set()
    assert not {name for name in STRUCTURE.closure() if name.startswith("sinew_client.arm")}


def test_a_loop_imports_no_other_listener() -> None:
    """`sinew_client.control` hands its names on when they are used, so that a loop does not import all of them."""
    show = "import sys; print(*(n for n in sys.modules if n.startswith('sinew_client.control.listeners.')))"
    command = [sys.executable, "-c", f"import sinew_client.control.loop; {show}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert {name.rpartition(".")[2] for name in done.stdout.split()} == {"hold_log", "listener"}


def test_folders_import_downwards() -> None:
    assert not STRUCTURE.upward_rooms()


# A folder and another one that it does not import. For `serve` itself, only the files directly in it count.
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
        for name in imported_names(path)
        if f"{name}.".startswith(f"{foreign}.")
    }
    assert not found


LISTS_ENGINES = re.compile(
    r"\bengines? {0}(?:, {0})*,? (?:and|or) {0}\b".format("(?:eager|plan|cpu|onnx|cuda)")
)


def test_no_message_lists_engines_by_name() -> None:
    """`engines_that` makes such a list from what each engine says it can do, so that none falls behind."""
    assert STRUCTURE.places(LISTS_ENGINES, without=("sinew/engine/",)) == []
    assert STRUCTURE.texts(NAMES_AN_ENGINE, without=("sinew/engine/",)) == []


def test_the_facts_of_a_robot_are_read_in_one_file() -> None:
    assert STRUCTURE.places(PROBES_A_ROBOT, without=(ROBOT_FACTS,)) == []


def test_addresses_are_taken_apart_in_one_file() -> None:
    assert STRUCTURE.splits_addresses() == [ADDRESSES]


# Files outside of an engine's folder that import it. Every engine builds on eager and plan, so these two are left out.
ENGINES = {
    "cpu": {
        *("assemble.py", "serve/prepare.py"),
        *("checks/__init__.py", "lowbit/quantization.py"),
    },
    # A recipe with FP8 is checked where it is read.
    "cuda": {"checks/__init__.py", "lowbit/quantization.py", "lowbit/recipes.py"},
    "onnx": {
        *(
            "checks/__init__.py",
            "lowbit/quantization.py",
        ),
        *("cli/export.py", "checks/preparing.py", "serve/prepare.py"),
    },
}


def test_an_engine_is_its_folder() -> None:
    assert {name: STRUCTURE.importers(f"engine/{name}") for name in ENGINES} == ENGINES


# Folders that read or write other projects' forms of steps, and the other files that import a step's module.
WRITE_STEPS = ("families", "vlacpp", "convert", "steps")
STEPS = {
    "steps/image/bilinear": {"processing/image.py", "engine/cpu/kernels/frame_kernels.py"},
    "steps/image/compiled": {"engine/cpu/kernels/frame_kernels.py", "engine/cpu/kernels/library.py"},
    "steps/image/jpeg": {"engine/cpu/kernels/frame_kernels.py"},
    "steps/image/resample": {"engine/cpu/kernels/frame_kernels.py"},
    "steps/image/tensorflow": {"engine/cpu/kernels/frame_kernels.py"},
    "steps/image/letterbox": {"engine/cuda/kernels/resize_tables.py"},
}


def test_a_step_is_its_file() -> None:
    """Only converters name a step. Everything else calls the step through its interface."""
    importers = {
        place: {path for path in STRUCTURE.importers(place) if path.partition("/")[0] not in WRITE_STEPS}
        for path in sorted((PACKAGE / "steps").glob("*/*.py"))
        if path.stem != "base"
        for place in [path.relative_to(PACKAGE).with_suffix("").as_posix()]
    }
    assert {place: files for place, files in importers.items() if files} == STEPS


def test_storage_exchanges_no_class() -> None:
    """Only a rewrite changes the class of a layer, and `core/called.py` makes a package callable."""
    assert {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    } == {"core/called.py", "engine/plan/rewrite.py"}


# Files outside of the server and the command line that import the server.
SERVED = {"targets.py"}  # recordings are replayed like a served policy


def test_records_are_read_without_the_server() -> None:
    """A recording is a file format. Reading one needs no server."""
    others = [path for path in FILES if room_of(path) not in ("serve", "cli")]
    found = {str(path.relative_to(PACKAGE)) for path in others if "serve" in STRUCTURE.imported_rooms(path)}
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


# Classes of one name: a facade and its protocol.
SHARED_NAMES = {"Policy"}


def test_a_class_has_a_name_of_its_own() -> None:
    assert STRUCTURE.shared_names() == SHARED_NAMES


def test_nobody_asks_an_engine_which_one_it_is() -> None:
    """Backends and facts describe the differences between engines."""
    assert not STRUCTURE.compares_engines()
    assert not STRUCTURE.places(PROBES_AN_ENGINE, without=("sinew/engine/", "perf/sinew_perf/"))
