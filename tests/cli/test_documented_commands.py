"""Commands of the documentation are commands of the program: each is parsed, none is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from sinew.cli import build_app, settings, terminal

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("README.md", "docs/tutorial-lerobot.md", "docs/tutorial-openpi.md", "docs/tutorial-quantise.md"),
    *("docs/deployment.md", "docs/control.md", "docs/eval.md", "docs/ros.md"),
)


def commands(page: str) -> list[str]:
    """Lines of a page's code blocks that begin with ``sinew VERB``."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"sinew [a-z]+ ", line)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_understood(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = build_app()
    monkeypatch.setattr(terminal, "output", terminal.Output())
    for line in (found := commands(page)):
        words = shlex.split(line, comments=True)[1:]
        if "..." in words or ">" in words:
            continue
        terminal.take_json(words)
        settings.take_config(words)
        try:
            app.parse_args(words, exit_on_error=False, print_error=False)
        except Exception as error:  # noqa: BLE001 - whatever it is, the line is wrong
            pytest.fail(f"{line}\n{error}")
    assert found or page == "docs/deployment.md"


def test_every_page_is_part_of_the_site() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = [next(iter(each.values())) for part in site["nav"] for each in _entries(part)]
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert sorted(named) == pages


def _entries(part: dict[str, Any]) -> list[dict[str, str]]:
    inner = next(iter(part.values()))
    return inner if isinstance(inner, list) else [part]


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "packages").glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
