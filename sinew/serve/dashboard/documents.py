"""The pages of the documentation for users of the dashboard, rendered from the Markdown files of this installation."""

from __future__ import annotations

import html
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import sinew

# Key: file name of a page of docs/. Value: title of the page in the menu. pyproject.toml lists the same pages for the
# wheel.
PAGES = {
    "dashboard": "This dashboard",
    "troubleshooting": "Troubleshooting",
    "commands": "Commands",
    "protocols": "Protocols",
    "control": "Drive a robot",
    "late-answers": "Late answers",
    "limits": "Limits and filters",
    "wiring": "Check the wiring",
    "deployment": "Deployment",
    "glossary": "Glossary",
}
LINK = re.compile(r'<a href="(?!https?:)([^"#]*)(#[^"]*)?">')
PICTURE = re.compile(r'<img src="[^"]*" alt="([^"]*)"[^>]*>')
HEAD = re.compile(r"<h([1-6])>(.*?)</h\1>")
NOTE = re.compile(r'^!!! (\w+)(?: "(.*)")?\n((?: {4}.*\n|\n(?= {4}))+)', re.MULTILINE)


def folders() -> Iterator[Path]:
    """Yield the folders that may contain the pages: docs/ next to the package in a clone, or the documents of the
    wheel.
    """
    yield Path(sinew.__file__).parents[1] / "docs"
    yield Path(sysconfig.get_path("data")) / "share" / "doc" / "sinew"


def rendered(page: str) -> str | None:
    """Return a page as HTML; None if there is no such page, or if this installation has no documents."""
    paths = (folder / f"{page}.md" for folder in folders() if page in PAGES)
    file = next((each for each in paths if each.is_file()), None)
    if file is None:
        return None
    from markdown_it import MarkdownIt  # the package rich depends on this package

    text = NOTE.sub(_note, file.read_text("utf-8"))  # own file: in an installed package
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = PICTURE.sub(r"<em>\1</em>", LINK.sub(_link, HEAD.sub(_head, body)))
    body = body.replace("<table>", '<div class="scroll" tabindex="0" role="group" aria-label="Table"><table>')
    body = body.replace("</table>", "</table></div>").replace("<th></th>", "<td></td>")
    menu = " ".join(
        f'<a href="/docs/{name}"{" aria-current=page" * (name == page)}>{html.escape(title)}</a>'
        for name, title in PAGES.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(PAGES[page])} - Sinew</title><link rel="stylesheet" href="/dashboard/page.css">
<link rel="icon" href="data:,"></head>
<body><a class="skip" href="#main">Skip to the content</a>
<header><nav aria-label="Documents"><a href="/">back to the dashboard</a> {menu}</nav></header>
<main id="main" class="document">{body}</main></body></html>
"""


def _note(found: re.Match[str]) -> str:
    """Convert a note block of mkdocs (``!!! note``) to a Markdown quotation, because CommonMark has no note blocks."""
    kind, title, text = found.groups()
    lines = [f"**{title or kind.capitalize()}**", "", *(line[4:] for line in text.splitlines())]
    return "\n".join(f"> {line}".rstrip() for line in lines) + "\n"


def _head(found: re.Match[str]) -> str:
    level, text = found.groups()
    plain = re.sub(r"[^\w -]", "", html.unescape(re.sub(r"<[^>]*>", "", text)).lower())
    return f'<h{level} id="{plain.strip().replace(" ", "-")}">{text}</h{level}>'


def _link(found: re.Match[str]) -> str:
    """Change the target of an HTML link to the page on this server. If this installation does not have the page, the
    link becomes plain text.

    Args:
        found: Match of ``LINK`` in the HTML of a page.
    """
    path, anchor = found[1], found[2] or ""
    if not path:
        return found[0]
    name = path.removesuffix(".md")
    return (
        f'<a href="/docs/{name}{anchor}">' if name in PAGES else f'<a title="{path}{anchor} of the source">'
    )
