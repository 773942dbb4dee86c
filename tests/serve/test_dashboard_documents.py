"""The documents that the dashboard leads to: rendered from the installation, whole, and in the wheel."""

from __future__ import annotations

import re
import tomllib
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest

import sinew
from sinew.serve.dashboard.documents import PAGES, rendered
from tests.serve.test_python_server import Own

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_there_and_its_links_lead_somewhere() -> None:
    pages = {name: rendered(name) or "" for name in PAGES}
    marks = {name: set(re.findall(r' id="([^"]*)"', text)) for name, text in pages.items()}
    for name, text in pages.items():
        assert text.count("<h1") == 1
        assert text.count("aria-current=page") == 1
        assert "<th></th>" not in text  # a heading that says nothing
        assert "!!!" not in text  # an admonition of mkdocs
        assert not re.search(r"<img|\.md[#\"]|<script", re.sub(r'<a title="[^"]*">', "", text))
        for page, anchor in re.findall(r'href="(?:/docs/([\w-]+))?(?:#([\w-]+))?"', text):
            assert (page or name) in pages
            assert not anchor or anchor in marks[page or name], (name, page, anchor)
    assert re.search(
        r"<blockquote>\s*<p><strong>Warning</strong></p>\s*<p>By default, the server", pages["protocols"]
    )
    assert '<a title="ros.md of the source">ROS 2</a>' in pages["dashboard"]


def test_the_wheel_carries_them() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert built["shared-data"] == {f"docs/{name}.md": f"share/doc/sinew/{name}.md" for name in PAGES}


def test_a_server_shows_them() -> None:
    with sinew.serve(Own(), ["http:0"]) as server:
        address = server.addresses["http"]
        with urllib.request.urlopen(f"{address}/", timeout=60) as found:
            assert b'<a href="/docs/dashboard">documents</a>' in found.read()
        with urllib.request.urlopen(f"{address}/docs/troubleshooting", timeout=60) as found:
            assert found.read().decode() == rendered("troubleshooting")
            assert "default-src 'none'" in found.headers["Content-Security-Policy"]
        with urllib.request.urlopen(f"{address}/docs/late-answers", timeout=60) as found:
            assert found.read().decode() == rendered("late-answers")
        for page in ("plan", "..%2FREADME"):
            with pytest.raises(HTTPError, match="404") as refused:
                urllib.request.urlopen(f"{address}/docs/{page}", timeout=60)
            assert (
                refused.value.read()
                == b"this installation has no such page; docs/ in the source has all pages\n"
            )
