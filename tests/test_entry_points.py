"""What other distributions bring: families, wires and steps, found by their entry points. Engines: tests/contract."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.core import BundleError, SinewError, registry
from sinew.engine import backend
from sinew.policy import load
from sinew.serve import wires
from tests.bundle.test_bundle import with_manifest

ASSETS = Path(__file__).resolve().parents[1] / "sinew" / "assets"
FAMILY = """
from sinew.core.registry import Family
FAMILY = Family(models={"theirs-v1": "model:Theirs"}, units={"theirs-v1": ("radian",)})
"""
WIRE = """
from sinew.serve.wire import Wire
WIRE = Wire("theirs", 8123, "as http", "http", "sinew.serve.wires.actions:ROUTES")
"""
STEP = """
from dataclasses import dataclass, field
from typing import Literal
from sinew.steps.image.base import ImageStep

@dataclass(frozen=True)
class Negative(ImageStep):
    keeps_size = True
    kind: Literal["negative"] = field(default="negative", kw_only=True, repr=False)

    def forward(self, frame):
        return 255 - frame
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution on the path, as pip leaves one."""
    package, about = tmp_path / "their_family", tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").write_text(FAMILY)
    (package / "model.py").write_text("class Theirs:\n    pass\n")
    (package / "wire.py").write_text(WIRE)
    (package / "broken.py").write_text("def\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    points = "[sinew.families]\ntheirs = their_family\n[sinew.wires]\ntheirs = their_family.wire:WIRE\n"
    (about / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(wires, "WIRES", dict(wires.WIRES))
    registry._added.cache_clear()
    yield about / "entry_points.txt"
    registry._added.cache_clear()


def test_a_family_of_another_distribution(installed: Path) -> None:
    family = registry.architectures()["theirs-v1"]
    assert (family.name, family.folder.name) == ("theirs", "their_family")
    assert registry.model_class("theirs-v1").__name__ == "Theirs"
    assert registry.action_units("Theirs-V1") == ("radian",)
    assert {each.name for each in registry.families()} == {*registry.FAMILIES, "theirs"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("smolvla = their_family", "smolvla = their_family: a family of this name is part of sinew"),
        ("theirs = no_such_package", "theirs = no_such_package: expected a package with FAMILY"),
        ("theirs = their_family.model", "theirs = their_family.model: expected a package with FAMILY"),
        (
            "theirs = their_family.broken",
            "theirs = their_family.broken: expected a package with FAMILY: .*syntax",
        ),
    ],
)
def test_what_is_no_family_is_said(installed: Path, line: str, words: str) -> None:
    installed.write_text(f"[sinew.families]\n{line}\n")
    registry._added.cache_clear()
    with pytest.raises(BundleError, match=words):
        list(registry.families())


def test_a_wire_of_another_distribution(installed: Path) -> None:
    assert wires.parse(["native", "theirs"]) == {"native": 5555, "theirs": 8123}
    assert wires.WIRES["theirs"].web
    installed.write_text("[sinew.wires]\nother = their_family.wire:MISSING\n")
    with pytest.raises(SinewError, match="other = their_family.wire:MISSING: expected a Wire"):
        wires.parse(["other"])
    installed.write_text("[sinew.wires]\nother = their_family.broken:WIRE\n")
    with pytest.raises(SinewError, match="their_family.broken:WIRE: expected a Wire: .*syntax"):
        wires.parse(["other"])
    installed.write_text("")
    with pytest.raises(SinewError, match="--wire nothing: expected one of native"):
        wires.parse(["nothing"])


def test_what_is_no_engine_is_said(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_added", backend._added.__wrapped__)
    monkeypatch.setattr(backend, "_backend", backend._backend.__wrapped__)
    installed.write_text("[sinew.engines]\ntheirs = their_family:BACKEND\n")
    words = "sinew.engines: theirs = their_family:BACKEND: expected a Backend: .*no attribute 'BACKEND'"
    with pytest.raises(SinewError, match=words):
        backend.BACKENDS["theirs"]


def test_an_image_step_of_another_distribution(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bundle that lists it is inspected and computes with it; without the package it is refused by name, and so is a
    name that is a place of this program's, for a file says the name."""
    (tmp_path / "their_negative.py").write_text(STEP)
    points = "[sinew.steps]\nnegative = their_negative:Negative\n"
    installed.write_text(points)
    from their_negative import Negative  # type: ignore[import-not-found]

    pen, bundle = ASSETS / "pen.gguf", Bundle(ASSETS / "pen.gguf")
    processing = bundle.manifest.processing
    turned = replace(processing, image=replace(processing.image, steps=(Negative(), *processing.image.steps)))
    theirs = with_manifest(pen, tmp_path / "theirs.gguf", processing=turned)
    assert main(["inspect", str(theirs)]) == 0
    assert "Negative()" in capsys.readouterr().out
    seen = load(pen, engine="eager").dummy_observation()
    dark = replace(seen, images={name: 255 - frame for name, frame in seen.images.items()})
    answers = [load(each, engine="eager").infer(of).actions for each, of in ((theirs, seen), (pen, dark))]
    assert np.array_equal(*answers)
    for line, words in (
        (
            "",
            "expected one of resize, .*, or a ImageStep of an installed package (sinew.steps), got 'negative'",
        ),
        (
            "negative = their_negative:Literal",
            "or a ImageStep of an installed package .sinew.steps., got .negative",
        ),
        ("negative = their_family.broken:X", "their_family.broken:X: expected a ImageStep: .*syntax"),
    ):
        installed.write_text(f"[sinew.steps]\n{line}\n")
        assert main(["inspect", str(theirs)]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert re.search(words.replace("(", r"\(").replace(")", r"\)"), said), said
    with pytest.raises(ValueError, match="got 'os:system'"):
        type(turned.image.steps[0]).registered("os:system")
