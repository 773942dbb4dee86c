"""Rules of the style sheet (CONTRIBUTING.md) that a program can check. A reader judges the rest.

The rules hold for every help text and message, and for the pages of PAGES. A page is added to PAGES when somebody has
rewritten it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("sinew", "eval", "perf", "packages")
BASE = "4ffe9301"  # commit subjects follow the form after this commit
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/concepts.md",
    "docs/hardening.md",
    "docs/install.md",
    "docs/quick-start.md",
    "tests/README.md",
)
OUTPUT = ("README.md", "docs/install.md", "docs/quick-start.md")  # guides that show what a command prints
HEADLESS = re.compile(r"(of|that|as of|by|at)\b")
PRIVATE = re.compile(
    r"\b(anew|whoever|whatever|beside|is told|are told|held against|strangers?|riddle|hand-over|embedded task|wires?"
    r" (?:of|that)|refuses? by name|nobody is)\b",
    re.IGNORECASE,
)


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not {"tests", "templates", "build", "node_modules"} & set(path.relative_to(ROOT).parts):
                yield path, ast.parse(path.read_text(encoding="utf-8"))


TREES = list(sources())


def help_texts() -> Iterator[tuple[str, str, str]]:
    """Yield (file, parameter, text) of what `--help` prints: the Args of functions in folders called cli."""
    for path, tree in TREES:
        if "cli" not in path.parts:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (doc := ast.get_docstring(node)):
                section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
                for entry in re.finditer(r"^    (\w+): (.+)", section[1] if section else "", re.MULTILINE):
                    yield str(path.relative_to(ROOT)), entry[1], entry[2]


def prose(page: str) -> str:
    """Return the sentences of a page, without code, tables, links' targets and admonitions' heads."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(\||!!!|===|    \S).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def test_a_help_text_has_a_subject() -> None:
    """It stands alone: the site sorts all flags by their names."""
    texts = list(help_texts())
    assert len(texts) > 250
    assert [text for text in texts if HEADLESS.match(text[2])] == []


def test_a_message_says_what_it_got() -> None:
    strings = [
        (path.name, node.value)
        for path, tree in TREES
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(strings) > 10_000
    assert [each for each in strings if re.search(r"got (another|more than that)\b", each[1])] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_uses_plain_words(page: str) -> None:
    text = prose(page)
    assert PRIVATE.findall(text) == []
    assert [line for line in text.splitlines() if ";" in line] == []


@pytest.mark.parametrize("page", OUTPUT)
def test_a_guide_shows_what_a_command_prints(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.search(r"^ *```(text|console)", text, re.MULTILINE)


def test_commit_subjects_have_one_form() -> None:
    """``area: imperative summary``, at most 72 characters."""
    command = ["git", "-c", "safe.directory=*", "log", "--no-merges", "--format=%s", f"{BASE}..HEAD"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if log.returncode:
        pytest.skip("not a git checkout with its history")
    subjects = log.stdout.splitlines()
    assert [line for line in subjects if len(line) > 72 or not re.match(r"[a-z0-9_. -]+: [a-z]", line)] == []
