"""What the pages name is there: test files, files of the product, constants of the tables of bounds."""

from __future__ import annotations

import re

import pytest

from tests.journeys.pages import BLOCK, PAGES, ROOT

PRODUCT = {
    path: path.read_text(encoding="utf-8")
    for root in (ROOT / "sinew", ROOT / "packages")
    for path in root.rglob("*.py")
}
ROOTS = ("sinew", "eval", "perf", "packages", "tests", "benchmarks", "research", "docs")
FILES = [f"/{path.relative_to(ROOT)}" for root in ROOTS for path in (ROOT / root).rglob("*.py")]
ELSEWHERE = {  # files to be written, and files of upstream's repositories
    "families/NAME/convert.py",
    "families/NAME/model.py",
    "gr00t/eval/service.py",
    "gr00t/policy/server_client.py",
    "Evo_1/scripts/Evo1_server.py",
}
TESTS = {
    path.name: path
    for folder in ("tests", "tools", "research", "eval", "perf", "packages")
    for path in (ROOT / folder).rglob("test_*.py")
}
BOUNDS = "SECURITY.md"
FOLDERS = "sinew|tests|tools|benchmarks|research|eval|perf|train|docker"


def spoken(text: str) -> list[str]:
    """Return what stands in backticks outside of blocks."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))


@pytest.mark.parametrize("page", [*PAGES, BOUNDS])
def test_files_of_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in spoken(text):
        if re.fullmatch(r"(tests/[\w/]*)?test_\w+\.py", name):
            assert (ROOT / name).exists() if "/" in name else name in TESTS, f"{page}: {name}"
        elif re.fullmatch(rf"({FOLDERS})/[\w/.-]+\.(py|proto|json|sh|toml|h)", name):
            assert (ROOT / name).exists(), f"{page}: {name}"
        elif re.fullmatch(r"\w+/[\w/-]+\.py", name) and name not in ELSEWHERE:
            assert any(path.endswith(f"/{name}") for path in FILES), f"{page}: {name}"


def test_bounds_are_where_the_page_says() -> None:
    """The table of SECURITY.md: its constants are names of the product, its files are files there."""
    table = (ROOT / BOUNDS).read_text(encoding="utf-8").split("## What is bounded")[1].split("\n## ")[0]
    named = [
        name for line in table.splitlines() if line.startswith("|") for name in spoken(line.split("|")[3])
    ]
    constants = [name for name in named if re.fullmatch(r"[A-Z][A-Z_]+", name)]
    files = [name for name in named if name.endswith(".py") and not name.startswith("tests/")]
    assert len(constants) > 10
    assert len(files) > 5
    for name in constants:
        assert any(re.search(rf"^ *{name}\b.* = ", text, re.MULTILINE) for text in PRODUCT.values()), name
    for name in files:
        assert any(path.as_posix().endswith(f"/{name}") for path in PRODUCT), name
