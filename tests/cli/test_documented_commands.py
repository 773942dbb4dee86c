"""Commands of the documentation are commands of the program: each is parsed, none is run."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import App

from sinew.cli import build_app, settings, terminal
from sinew.cli.verbs import VERBS, commands
from tests.journeys.pages import BLOCK, PAGES, ROOT, lines, programs, without_comment
from tests.serve import browser

EVERYWHERE = {"json", "debug", "config", "help"}


@pytest.fixture(scope="module")
def app() -> App:
    return build_app()


def mentions(text: str) -> list[str]:
    """Commands within a page's sentences and tables, which may leave out what does not matter there."""
    return [found.replace("\n", " ") for found in re.findall(r"`(sinew [^`]+)`", BLOCK.sub("", text))]


def verb_of(app: App, words: list[str]) -> App:
    """The verb that a line begins with, or the group, where nothing of it follows."""
    verbs = VERBS
    for word in words:
        if not verbs or word.startswith("-"):
            break
        assert word in verbs, words
        app, verbs = app[word], verbs[word].commands
    return app


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_understood(page: str, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "output", terminal.Output())
    for line in lines(page):
        if not line.startswith("sinew "):
            continue
        words = [word for word in shlex.split(line)[1:] if word != "&"]
        if "..." in words or ">" in words:
            continue
        terminal.take_json(words)
        settings.take_config(words)
        try:
            app.parse_args(words, exit_on_error=False, print_error=False)
        except Exception as error:  # noqa: BLE001 - whatever it is, the line is wrong
            pytest.fail(f"{line}\n{error}")
    for line in mentions(PAGES[page].read_text()):
        words = line.split()[1:]
        verb = verb_of(app, words)
        if flags := {word.partition("=")[0] for word in words if word.startswith("--")}:
            arguments = verb.assemble_argument_collection()
            known = {each.name.removeprefix("--") for each in arguments if each.show} | EVERYWHERE
            assert {flag.removeprefix("--") for flag in flags} <= known, line


def test_the_readme_and_tutorials_show_commands() -> None:
    shown = {page: sum(line.startswith("sinew ") for line in lines(page)) for page in PAGES}
    assert shown["docs/commands.md"] >= 15
    assert shown["README.md"] >= 5
    assert all(count >= 5 for name, count in shown.items() if "tutorial-" in name)


def test_the_model_of_adding_a_model_is_the_templates() -> None:
    """The code of the page is the code that `sinew new family my_arm` writes, without its docstrings and comments."""
    folder = ROOT / "sinew" / "cli" / "templates" / "family" / "our_name"
    written = "".join((folder / f"{name}.py-tpl").read_text() for name in ("model", "convert", "__init__"))
    code = {
        without_comment(line)
        for line in written.replace("OurName", "MyArm").replace("our_name", "my_arm").splitlines()
    }
    shown = [line for text in programs("docs/adding-a-model.md") for line in text.splitlines()]
    assert len(shown) > 60
    assert [line for line in shown if without_comment(line) not in code] == []


def test_every_page_is_part_of_the_site() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = [next(iter(each.values())) for part in site["nav"] for each in _entries(part)]
    pages = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
    assert named[0] == "index.md"  # README.md, by docs/site.py
    assert sorted(name for name in named[1:] if not name.startswith("repository/")) == pages


def _entries(part: dict[str, Any]) -> list[dict[str, str]]:
    inner = next(iter(part.values()))
    return inner if isinstance(inner, list) else [part]


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES.values(), *(ROOT / "research" / "log").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_pages_of_the_site_are_made_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    reference = importlib.import_module("reference")
    pages = reference.pages()
    menu = str(reference.menu())
    for words, verb in commands():
        page = pages[f"verbs/{'-'.join(words)}.md"]
        assert f"sinew {verb.example}" in page
        assert f"/verbs/{'-'.join(words)}.md" in menu
    assert "| `--action-limits` (`refuse`, `clamp`, `off`) | `refuse` |" in pages["verbs/serve.md"]
    settings = pages["settings.md"]
    assert re.search(r"^\| `--timeout` \| .*`SINEW_BENCH_TIMEOUT`.*[Ss]econds", settings, re.MULTILINE), (
        settings
    )
    assert re.search(r"^\| `--rename` \| .*[Cc]amera", settings, re.MULTILINE)
    for name in re.findall(r"^::: (\S+)", pages["python.md"], re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name


@pytest.mark.slow
@pytest.mark.skipif(
    browser.find() is None or importlib.util.find_spec("material") is None,
    reason="needs Chromium or Chrome on the path, and what `make docs` installs",
)
def test_the_site_is_searched_from_the_disk_without_a_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True)
    for path in site.rglob("*.html"):
        assert not re.search(r'<(script|link rel="stylesheet")[^>]* (src|href)="http', path.read_text()), path
    with browser.browsing(f"file://{site}/control.html", tmp_path / "profile") as page:
        page.size(1280, 900)
        for words, found in {
            "timeout": "timeout",
            "rename cameras": "--rename",
            "Client.infer": "infer",
        }.items():
            page.wait(
                f"""(box => {{
                    box.focus();
                    box.value = "{words}";
                    box.dispatchEvent(new Event("keyup", {{bubbles: true}}));
                    return document.querySelector(".md-search-result__list").innerText.includes("{found}");
                }})(document.querySelector(".md-search__input"))"""
            )
        assert page.evaluate("document.querySelector('.md-search').ariaLabel")
        page.call("Page.navigate", url=f"file://{site}/index.html")
        first = "[...document.querySelectorAll('pre')].find(each => each.innerText.includes('sinew serve'))"
        page.wait(f"document.images[0].complete && {first}.getBoundingClientRect().bottom <= 900")
        for width in (1280, 400):
            page.size(width, 900)
            page.wait(f"document.documentElement.scrollWidth <= {width}")
        # What a command prints has columns, so its lines are not broken.
        assert (
            page.evaluate("getComputedStyle(document.querySelector('.language-text code')).whiteSpace")
            == "pre"
        )
        assert not page.errors
