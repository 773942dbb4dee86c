"""Rules of the style sheet (CONTRIBUTING.md) that a program can check. A reader judges the rest.

The rules hold for every help text and message, and for every page.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sinew_client
from sinew_client import documentation

import sinew

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("sinew", "eval", "perf", "packages")
BASE = "4ffe9301"  # commit subjects follow the form after this commit
PATTERNS = ("docs/*.md", "packages/*/README.md", "eval/README.md", "perf/README.md")
PAGES = (  # every page: a new one is checked from its first day
    *sorted(str(path.relative_to(ROOT)) for pattern in PATTERNS for path in ROOT.glob(pattern)),
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "tests/README.md",
)
REFERENCE = (  # pages without a command whose output a reader compares
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/concepts.md",
    "docs/decisions.md",
    "docs/families.md",
    "docs/glossary.md",
    "docs/hardening.md",
    "docs/kernels.md",
    "docs/peers.md",
    "docs/speed-by-family.md",
    "docs/structure.md",
    "packages/lerobot_policy_sinew/README.md",  # LeRobot's commands print
    "tests/README.md",
)
OUTPUT = tuple(page for page in PAGES if page not in REFERENCE)  # guides that show what a command prints
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


def documentation_of(tree: ast.Module) -> set[int]:
    """Return the identities of the nodes of a module's docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = (node.body[0] for node in ast.walk(tree) if isinstance(node, kinds) and node.body)
    return {id(each.value) for each in firsts if isinstance(each, ast.Expr)}


def visible() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of everything that a user reads: strings, the help of commands, and public docstrings."""
    for path, tree in TREES:
        internal = documentation_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in internal:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
            command = isinstance(node, ast.FunctionDef | ast.ClassDef) and "cli" in path.parts
            if command and (doc := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", doc
    for name, value in PUBLIC:
        yield name, inspect.getdoc(value) or ""


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


def test_a_text_names_the_title_of_a_page_and_not_its_file() -> None:
    """An installed package has no docs/, so ``sinew_client.documentation.page`` writes the reference."""
    titles = {path.read_text("utf-8").splitlines()[0] for path in (ROOT / "docs").glob("*.md")}
    texts = list(visible())
    assert len(texts) > 10_000
    assert [each for each in texts if re.search(r"\bdocs/[\w-]+\.md|\[[\w-]+\.md\]", each[1])] == []
    named = {
        title for _, text in texts for title in re.findall(r'\bpages? "([^"{]+)"', " ".join(text.split()))
    }
    assert {f"# {title}" for title in named | {*documentation.TITLES.values()}} - titles == set()
    for name, title in documentation.TITLES.items():
        assert (ROOT / "docs" / f"{name}.md").read_text("utf-8").startswith(f"# {title}\n")


def test_one_function_knows_the_address_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert documentation.page("install") == 'the page "Install" of the documentation'
    monkeypatch.setattr(documentation, "SITE", "https://example.org/")
    assert "(https://example.org/install.html)" in documentation.page("install")


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


# ----------------------------------------------------------------------------- docstrings

PLAIN = (  # folders whose docstrings and comments have been rewritten
    "benchmarks",
    "eval/sinew_eval",
    "examples",
    "packages/lerobot_policy_sinew/src",
    "packages/sinew-client/src/sinew_client",
    "packages/sinew_ros/sinew_ros",
    "perf/sinew_perf",
    "sinew/bench",
    "sinew/bundle",
    "sinew/checks",
    "sinew/cli",
    "sinew/convert",
    "sinew/core",
    "sinew/engine",
    "sinew/families",
    "sinew/layers",
    "sinew/lowbit",
    "sinew/models",
    "sinew/processing",
    "sinew/records",
    "sinew/serve",
    "sinew/steps",
    "sinew/stream",
    "sinew/vlacpp",
    "tools",
)
CLAUSE = re.compile(r"\b(Return|Yield|Hold|Say) (what|where|who|whatever)\b")
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):\n((?:    .*\n?|\n)+)", re.MULTILINE)
DEFAULT = re.compile(
    r"\bdefault (?:is|of) (-?\d[\d.]*|\"[^\"]*\"|True|False|None)(?=[\s,;.)]|$)", re.IGNORECASE
)


def docstrings(folder: str) -> Iterator[tuple[str, str]]:
    """Yield (place, docstring) of each module, class and function of a folder, or of the files next to it."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, kinds) and (doc := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", doc


@pytest.mark.parametrize("folder", PLAIN)
def test_a_docstring_names_its_result_with_a_noun(folder: str) -> None:
    texts = list(docstrings(folder))
    assert texts
    assert [(place, doc[:80]) for place, doc in texts if CLAUSE.search(doc)] == []


@pytest.mark.parametrize("folder", PLAIN)
def test_a_trailing_comment_has_a_subject(folder: str) -> None:
    """It is a clause or a noun, and not a preposition that continues the code."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        with tokenize.open(path) as file:
            for token in tokenize.generate_tokens(file.readline):
                behind = token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
                if behind and HEADLESS.match(token.string.lstrip("# ")):
                    found.append((f"{path.relative_to(ROOT)}:{token.start[0]}", token.string))
    assert found == []


def exports() -> list[tuple[str, Any]]:
    """Return (name, object) of everything that sinew_client and sinew export."""
    found = [(f"sinew_client.{name}", getattr(sinew_client, name)) for name in sinew_client.__all__]
    for name in sinew.__all__:
        value = getattr(sinew, name)
        if isinstance(value, ModuleType):  # sinew.convert and sinew.serve are called as a function
            value = {"convert": getattr(value, "convert", None), "serve": sinew.Server}[name]
        if callable(value):
            found.append((f"sinew.{name}", value))
    return found


def public() -> list[tuple[str, Any]]:
    """Return the exported functions and classes, and the public methods that these classes define."""
    found = []
    for name, value in exports():
        found.append((name, value))
        if inspect.isclass(value) and not issubclass(value, Exception):
            own = [(key, getattr(value, key)) for key in vars(value) if not key.startswith("_")]
            found += [(f"{name}.{key}", method) for key, method in own if inspect.isroutine(method)]
    return found


PUBLIC = public()


def sections(value: Any) -> dict[str, dict[str, str]]:
    """Return section -> entry -> text of a docstring; the text of Returns has the entry ""."""
    found: dict[str, dict[str, str]] = {}
    for title, body in SECTION.findall((inspect.getdoc(value) or "") + "\n"):
        entries = re.findall(r"^    (\*{0,2}\w+): ((?:.*\n?)(?:     .*\n?)*)", body, re.MULTILINE)
        found[title] = dict(entries) if title != "Returns" else {"": body}
    return found


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    if inspect.isclass(value) and (issubclass(value, Exception) or getattr(value, "_is_protocol", False)):
        return {}
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return {}
    return {name: each for name, each in signature.parameters.items() if name not in ("self", "cls")}


@pytest.mark.parametrize(("name", "value"), PUBLIC, ids=[name for name, _ in PUBLIC])
def test_a_public_docstring_has_its_sections(name: str, value: Any) -> None:
    """Every parameter and the result are described, and a default that the text states is that of the signature."""
    doc, found = inspect.getdoc(value) or "", sections(value)
    assert doc, f"{name} has no docstring"
    described = {
        key.lstrip("*"): text for part in ("Args", "Attributes") for key, text in found.get(part, {}).items()
    }
    given = parameters(value)
    private = {key for key in given if key == "settings" and name.endswith("Client")}
    assert [key for key in given if key not in described and key not in private] == []
    for key, parameter in given.items():
        for text in DEFAULT.findall(described.get(key, "")):
            assert ast.literal_eval(text.rstrip(".")) == parameter.default, f"{name}: {key}: {text}"
    if inspect.isroutine(value) and given:
        returned = inspect.signature(value).return_annotation
        assert "Returns" in found or returned in (None, "None") or doc.startswith("Return "), (
            f"{name}: Returns"
        )
