"""A family of policies is a folder and a line of the registry: nothing else in the product names it."""

from __future__ import annotations

import ast
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import sinew
import sinew.families
from sinew.convert import convert
from sinew.core import registry

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sinew"
HOME = PACKAGE / "families"
OTHERS = [
    *(ROOT / "eval" / "sinew_eval").rglob("*.py"),
    *(ROOT / "perf" / "sinew_perf").rglob("*.py"),
    *(ROOT / "packages").rglob("src/**/*.py"),
]
FILES = sorted([*PACKAGE.rglob("*.py"), *OTHERS])
FOLDERS = {family.name: family for family in registry.families()}
# What others call as a family is called, or what holds many families: file or folder -> words, and why they stay.
MEANT_OTHERWISE = {
    "sinew/core/registry.py": (set(registry.FAMILIES) - {"act", "diffusion"}, "the line of each"),
    "sinew/vlacpp": (None, "another project's format, which names architectures in its files"),
    "sinew/serve/wires": (
        {"groot", "gr00t", "evo1", "evo-1", "openvla", "openvla-oft"},
        "protocols of other projects' clients; any policy speaks them",
    ),
    **dict.fromkeys(
        ("sinew/bundle/schema.py", "sinew/processing/normalize.py"),
        ({"gr00t"}, "a convention of statistics, which bundles name"),
    ),
    "packages/sinew-client/src/sinew_client/arm/kinematics.py": (
        {"prismatic"},
        "a kind of joint of URDF",
    ),
    "eval/sinew_eval/training": (
        {"smolvla"},
        "the training library, which makes small policies of one family",
    ),
    "perf/sinew_perf/cli": (
        {"pi0.5"},
        "what `perf need` asks for by default",
    ),
}


def words_of(family: registry.Family) -> set[str]:
    """Return how a family is called: its folder, architectures, presets and classes."""
    classes = {place.rpartition(":")[2] for place in family.models.values()}
    words = {family.name, *family.models, *family.published(), *classes}
    return {word.lower() for word in words} - {"pi", "act", "diffusion"}  # a number, a verb, a kind of solver


WORDS = {"groot": "gr00t", "evo-1": "evo1", "oft": "openvla", "prismatic": "openvla", "jepa": "vla_jepa"}
for _family in reversed(FOLDERS.values()):  # BitVLA's class is OpenVLA's
    WORDS |= dict.fromkeys(words_of(_family), _family.name)
PATTERN = re.compile(
    rf"(?<![a-z0-9])({'|'.join(re.escape(word) for word in sorted(WORDS, key=len, reverse=True))})(?![a-z0-9])",
    re.IGNORECASE,
)


@cache
def read(path: Path) -> tuple[list[tuple[int, str]], set[str]]:
    """Return the line and the text of every string and import of a file, not of docstrings, which tell sources; and
    the names that it imports."""
    found, names = [], set()
    nodes = list(ast.walk(ast.parse(path.read_text())))
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found.append((node.lineno, node.value))
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, f"{node.module} {' '.join(alias.name for alias in node.names)}"))
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found.append((node.lineno, " ".join(alias.name for alias in node.names)))
    return found, names


def may_say(path: Path, word: str) -> bool:
    place = path.relative_to(ROOT).as_posix()
    for known, (words, _) in MEANT_OTHERWISE.items():
        if place == known or place.startswith(f"{known}/"):
            return words is None or word in words
    if HOME in path.parents:
        own = FOLDERS[path.relative_to(HOME).parts[0]]
        return WORDS[word] in (own.name, own.base)
    return False


def test_no_file_outside_names_a_family() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r} is of sinew/families/{WORDS[match[0].lower()]}"
        for path in FILES
        if path.parent != HOME
        for line, text in read(path)[0]
        for match in PATTERN.finditer(text)
        if not may_say(path, match[0].lower())
    ]
    assert not found, "\n".join(found)


def test_a_folder_is_imported_by_itself_and_its_descendants() -> None:
    """And vla.cpp's format, which reads files of several families; that one is imported to write a file alone. The
    training library makes small policies of one family."""
    for path in FILES:
        _, names = read(path)
        place = path.relative_to(ROOT).as_posix()
        folders = {
            name.split(".")[2] for name in names if name.startswith("sinew.families.")
        } & FOLDERS.keys()
        if HOME in path.parents and path.parent != HOME:
            own = FOLDERS[path.relative_to(HOME).parts[0]]
            assert folders <= {own.name, own.base}, place
        elif not place.startswith(("sinew/vlacpp/", "eval/sinew_eval/training/")):
            assert not folders, place
            theirs = any(name.startswith("sinew.vlacpp") for name in names)
            assert not theirs or place == "sinew/cli/export.py", place


@pytest.mark.parametrize("place", MEANT_OTHERWISE)
def test_every_exception_is_needed(place: str) -> None:
    words, why = MEANT_OTHERWISE[place]
    assert why
    files = [path for path in FILES if path == ROOT / place or ROOT / place in path.parents]
    said = {
        match[0].lower() for path in files for _, text in read(path)[0] for match in PATTERN.finditer(text)
    }
    assert said
    assert words is None or words - {"pi"} <= said


def test_each_folder_has_a_line_and_each_line_a_folder() -> None:
    folders = {path.name for path in HOME.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(registry.FAMILIES)
    assert len(registry.FAMILIES) == len(folders)


@pytest.mark.parametrize("name", registry.FAMILIES)
def test_what_a_folder_says_is_there(name: str) -> None:
    family = FOLDERS[name]
    assert family.models
    assert family.published()
    for place in (*family.models.values(), *family.converters, *family.guesses, family.golden):
        assert not place or family.load(place)
    for table in (family.units, family.hints):
        assert set(table) <= set(family.models)
    assert {record["architecture"] for record in family.published().values()} <= set(family.models)
    for converter in map(family.load, (*family.converters, *family.guesses)):
        assert all(
            hasattr(converter, part) for part in ("NAMES", "OPTIONS", "SETTINGS", "recognises", "read")
        )


def test_no_two_families_share_an_architecture_or_a_preset() -> None:
    for taken in (
        [architecture for family in FOLDERS.values() for architecture in family.models],
        [preset for family in FOLDERS.values() for preset in family.published()],
    ):
        assert len(taken) == len(set(taken))


# ----------------------------------------------------------------------------- what a new family touches


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A family that nobody knows, made of SmolVLA's files: a folder and a line of the registry."""
    folder = shutil.copytree(
        HOME / "smolvla",
        tmp_path / "families" / "toy",
        ignore=shutil.ignore_patterns("golden", "__pycache__"),
    )
    for path in (path for path in folder.rglob("*") if path.is_file()):
        text = (
            path.read_text()
            .replace("sinew.families.smolvla", "sinew.families.toy")
            .replace('"smolvla', '"toy')
        )
        path.write_text(text.replace('    golden="golden:check",\n', ""))
    monkeypatch.setattr(sinew.families, "__path__", [*sinew.families.__path__, str(folder.parent)])
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, "toy"))
    return "toy"


def test_a_new_family_is_its_folder_and_a_line(
    toy: str, golden: Path, smolvla_bundle, tmp_path: Path
) -> None:
    """Its checkpoint converts, its bundle runs on two engines, its published size is a preset, and the actions are
    those of the family that it was copied from; no other file was told of it."""
    case = shutil.copytree(golden / "smolvla-2cam", tmp_path / "case")
    for path in case.glob("checkpoint/*.json"):
        path.write_text(path.read_text().replace('"smolvla', f'"{toy}'))
    bundle = convert(case / "checkpoint", tmp_path / "toy.gguf", vlm=case / "vlm")
    rng = np.random.default_rng(0)
    known = sinew.load(smolvla_bundle(), engine="eager")
    state = rng.standard_normal(known.spec.state.dim).astype(np.float32)
    images = {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in known.spec.cameras}
    observation = {"images": images, "state": state, "prompt": "go", "seed": 0}
    for engine in ("eager", "plan"):
        policy = sinew.load(bundle, engine=engine)
        assert policy.spec.architecture == toy
        expected = sinew.load(smolvla_bundle(), engine=engine).infer(observation).actions
        assert np.array_equal(policy.infer(observation).actions, expected)
    assert registry.presets()[toy].name == toy
    assert registry.action_units("Toy") == ("recorded",)


NAMED = re.compile(r"`(?:sinew/)?((?:families|models|convert|vlacpp)/[a-z0-9_/]+(?:\.py|\.json|/))`")


@pytest.mark.parametrize("page", ["adding-a-model", "structure"])
def test_the_documents_name_files_that_are_there(page: str) -> None:
    named = set(NAMED.findall((ROOT / "docs" / f"{page}.md").read_text()))
    assert named
    assert not {
        name for name in named if not (PACKAGE / name).exists() and not (ROOT / "tests" / name).exists()
    }
