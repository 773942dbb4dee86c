"""``sinew new``: what it writes works before anybody changes a line of it, installed as pip installs it."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinew.cli import main
from sinew.cli.new import KINDS
from sinew.convert.sources import identity
from sinew.core import registry
from sinew.engine import backend
from sinew.policy import Policy, load
from tests import processes
from tests.contract import test_engine_verbs as contract

NAME = "my_arm"
PIP = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")


PROMISES = {
    name: tuple(inspect.signature(promise).parameters)
    for name, promise in vars(contract).items()
    if name.startswith("test_") and "policy" in inspect.signature(promise).parameters
}


def written(kind: str, home: Path) -> Path:
    """Return the written folder; ``site`` beside it holds what pip makes of it."""
    pytest.importorskip("hatchling", reason="pip builds the package with it")
    folder, log = home / "own", home / "log"
    assert main(["new", kind, NAME if kind == "family" else f"my_{kind}", "--out", str(folder)]) == 0
    done = subprocess.run([sys.executable, *PIP, "--target", home / "site", folder], stderr=log.open("w"))
    assert done.returncode == 0, log.read_text()
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("family", tmp_path_factory.mktemp("new"))


PIPED: dict[str, Any] = {"capture_output": True, "text": True}


def own_test(folder: Path, chosen: str, monkeypatch: pytest.MonkeyPatch, run: Any = processes.run) -> str:
    """Run the package's own test in a process of its own, and return what it says. run: an interpreter of its own
    where entry points are looked for, which the nursery knows from before."""
    monkeypatch.syspath_prepend(folder.parent / "site")
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, "tests"]
    done = run(words, cwd=folder, timeout=900, **({} if run is processes.run else PIPED))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_own_test_passes(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "5 passed" in own_test(made, "not onnx", monkeypatch)


@pytest.mark.slow  # an export
def test_its_own_test_passes_on_onnx(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    assert "1 passed" in own_test(made, "onnx", monkeypatch)


@pytest.mark.slow  # each is installed, one starts a server and one runs a robot for two seconds
@pytest.mark.parametrize(
    ("kind", "tests"), [("engine", 5), ("wire", 1), ("step", 1), ("robot", 2), ("task", 4)]
)
def test_what_else_is_written_passes_its_own_test(
    kind: str, tests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = own_test(written(kind, tmp_path), "test", monkeypatch, subprocess.run)
    assert f"{tests} passed" in said


@pytest.fixture(scope="module")
def own_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = written("engine", tmp_path_factory.mktemp("engine"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder.parent / "site")
        patch.setattr(backend, "_added", backend._added.__wrapped__)
        yield load("pen", device="cpu", engine="my_engine", threads=1)


@pytest.mark.slow  # the engine is installed
@pytest.mark.parametrize("promise", PROMISES)
def test_a_written_engine_keeps_the_contract_of_engines(promise: str, own_engine: Policy) -> None:
    reference = load("pen", device="cpu", engine="eager", threads=1)
    given = {"policy": own_engine, "eager": reference, "reference": reference.engine.model}
    getattr(contract, promise)(**{word: given[word] for word in PROMISES[promise]})


def test_verbs_know_an_installed_family(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(made.parent / "site")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_added", registry._added.__wrapped__)
    monkeypatch.setattr(identity, "converter", identity.converter.__wrapped__)
    before = identity.converter()
    importlib.import_module(f"{NAME}.checkpoint").write(Path("random"))
    for camera in ("front", "wrist"):
        Image.fromarray(np.full((48, 64, 3), 90, np.uint8)).save(f"{camera}.png")
    assert main(["convert", "random", "my_arm.gguf"]) == 0
    seen = ["--image", "front=front.png", "--image", "wrist=wrist.png", "--state", "0,-45,60,10,0,20"]
    capsys.readouterr()
    assert main(["infer", "my_arm.gguf", *seen, "--seed", "1", "--engine", "plan", "--json"]) == 0
    actions = np.array(json.loads(capsys.readouterr().out)["actions"])
    assert actions.shape == (8, 6)
    assert actions.std() > 1  # degrees
    assert main(["new", "family", NAME, "--out", "again"]) == 1
    assert (
        "expected a name that no other family has, got 'my_arm', which my_arm has" in capsys.readouterr().err
    )
    source = made.parent / "site" / NAME / "convert.py"
    with source.open("a") as file:
        file.write("# mended\n")
    assert identity.converter() != before  # what was converted before is converted anew
    for module in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[module]


@pytest.mark.parametrize(
    ("kind", "files"), [("family", 7), ("engine", 4), ("wire", 4), ("step", 3), ("robot", 3), ("task", 3)]
)
def test_what_is_written_is_clean(kind: str, files: int, tmp_path: Path) -> None:
    made = tmp_path / "my-arm"
    assert main(["new", kind, NAME, "--out", str(made)]) == 0
    texts = {path: path.read_text() for path in made.rglob("*") if path.suffix in (".py", ".toml", ".md")}
    assert len(texts) == files
    assert {path.parts[0] for path in (each.relative_to(made) for each in made.rglob("*"))} <= {
        *("pyproject.toml", "README.md", NAME, "tests")
    }
    group, _ = KINDS[kind]
    points = tomllib.loads(texts[made / "pyproject.toml"])["project"]["entry-points"]
    assert [*points] == [group]
    assert [*points[group]] == [NAME]
    for path, text in texts.items():
        assert not any(word in text for word in ("our_name", "OurName", "our-name", "OUR_")), path
    if (ruff := shutil.which("ruff", path=Path(sys.executable).parent)) is None:
        pytest.skip("ruff is not installed")
    for words in (["check", "--select", "E,F,I,UP,B"], ["format", "--check"]):
        command = [ruff, *words, "--isolated", "--no-cache", "--line-length", "110"]
        done = subprocess.run(command, cwd=made, capture_output=True)
        assert done.returncode == 0, done.stdout.decode()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My-Arm", "small letters and digits, words joined by '_', got 'My-Arm'; did you mean 'my_arm'?"),
        ("../arm", "got '../arm'; did you mean 'arm'?"),
        ("a" * 51, "at most 50"),
        ("class", "expected no Python keyword and no installed package, got 'class'"),
        ("tests", "got 'tests'"),
        ("act", "expected a name that no other family has, got 'act', which act has"),
        ("gr00tn15", "which gr00t has"),  # an architecture, spelt otherwise
        ("engine eager", "expected a name that no other engine has, got 'eager', which eager has"),
        ("wire http", "expected a name that no other wire has, got 'http', which http has"),
        ("step square", "expected a name that no other step has, got 'square', which square has"),
        ("robot tests", "got 'tests'"),
        ("robot dry", "expected a name that no other robot has, got 'dry', which dry has"),
    ],
)
def test_names_that_cannot_be(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, _, own = name.rpartition(" ")
    assert main(["new", kind or "family", own]) == 1
    assert words in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_all_of_it_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my-arm"
    folder.mkdir()
    assert main(["new", "family", NAME]) == 1
    assert "my-arm: the folder already exists" in capsys.readouterr().err
    folder.rmdir()  # empty as before
    written = Path.write_text

    def full(path: Path, *given: str, **options: str) -> int:
        if path.name == "pyproject.toml":
            raise OSError(28, "No space left on device", str(path))
        return written(path, *given, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["new", "family", NAME]) == 1
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
