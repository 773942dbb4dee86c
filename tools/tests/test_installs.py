"""Install lines and constraints.txt, as far as they can be checked without a package index (make installs asks one)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import installs

ROOT = installs.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_install_line_is_understood() -> None:
    """Those of the documents, of the Makefile and of docker/install.sh, each of which has some."""
    lines = installs.all_lines()
    where = {line.where.split()[0] for line in lines}
    assert {"README.md", "docs/install.md", "Makefile", "docker/install.sh"} <= where
    assert any(line.uv for line in lines)
    texts = {line.text for line in lines}
    assert "pip install -c constraints.txt ./packages/sinew-client '.[demo]' ./eval" in texts


def test_what_is_exempt_is_there() -> None:
    text = " ".join(" ".join(path.read_text() for path in installs.pages()).split())
    assert all(line in text for line in installs.EXEMPT)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("pip install --find-links wheels numpy", "'--find-links' is unknown"),
        ("pip install -c other.txt numpy", "expected -c constraints.txt"),
        ("conda install numpy", "expected pip or uv"),
        ("pip install -q", "expected the name of a package"),
        ("uv tool run sinew", "is unknown"),
    ],
)
def test_a_line_that_is_not_understood_fails(line: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        installs.parse("here", line)


def test_a_line_that_is_not_found_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is in a sentence and not marked as code."""
    page = tmp_path / "page.md"
    monkeypatch.setattr(installs, "ROOT", tmp_path)
    monkeypatch.setattr(installs, "pages", lambda: [page])
    page.write_text("Run `pip install numpy` here.\n")
    assert installs.unseen() == []
    assert [line.names for line in installs.of_documents()] == [["numpy"]]
    page.write_text("Then run pip install numpy here.\n")
    with pytest.raises(ValueError, match=re.escape("page.md: pip install numpy here.")):
        installs.all_lines()


def test_a_line_says_what_is_installed() -> None:
    line = installs.parse(
        "here", "python -m pip install -q -c constraints.txt -e ./a '.[b,c]' --no-deps  # why"
    )
    assert (line.names, line.constrained, line.alone, line.uv) == (["./a", ".[b,c]"], True, True, False)
    assert installs.parse("here", "uv pip install --torch-backend=cpu '.[a]' && more").names == [".[a]"]


def test_constraints_pin_all_that_is_named() -> None:
    """Exact versions, one for each place; triton and CUDA's libraries on Linux alone."""
    text = (ROOT / "constraints.txt").read_text()
    pins = [Requirement(line) for line in text.splitlines() if line[:1] != "#"]
    assert all(
        re.fullmatch(r"==[\w.!+]+", str(pin.specifier)) and "+" not in str(pin.specifier) for pin in pins
    )
    assert "://" not in text
    named = {
        canonicalize_name(Requirement(each).name)
        for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
        for each in group
    }
    assert named - {canonicalize_name(pin.name) for pin in pins} == set(installs.OURS)
    for place, there in (("linux", True), ("darwin", False), ("win32", False)):
        environment = {"platform_machine": "x86_64", "python_full_version": "3.12.1", "sys_platform": place}
        held = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment)]
        names = [canonicalize_name(pin.name) for pin in held]
        assert len(names) == len(set(names))
        assert ("triton" in names) is there
        assert any(name.startswith("nvidia-") for name in names) is there


def test_the_demo_needs_no_torch() -> None:
    """What the extra brings, followed through the extras that it names."""
    extras, wanted, seen = PROJECT["optional-dependencies"], ["demo"], set()
    while wanted:
        for requirement in map(Requirement, extras[wanted.pop()]):
            wanted += requirement.extras if requirement.name == PROJECT["name"] else []
            seen.add(requirement.name)
    evaluation = tomllib.loads((ROOT / "eval" / "pyproject.toml").read_text())["project"]
    seen |= {Requirement(each).name for each in evaluation["dependencies"]}
    assert seen == {"sinew-vla", "sinew-vla-eval", "onnxruntime", "matplotlib", "gymnasium", "mujoco"}
