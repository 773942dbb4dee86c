"""A hook of mkdocs: README.md is the front page, files beside docs/ that pages link to are part of the site, and so are
the pages that reference.py makes of the program."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
BESIDE = "repository"  # the folder of the site for what lies beside docs/
LINK = re.compile(r"(\]\()([^)#\s:]+)([^)]*\))")
WHOLE = re.compile(r"\[([^\[\]]*)\]\(([^)#\s:]+)[^)]*\)")
PLAIN = {"", ".sh", ".service"}  # shown as text rather than downloaded
RESEARCH = "research/"  # no part of the site: what a page links to there is named, without a link


sys.path.insert(0, str(Path(__file__).parent))
import reference  # noqa: E402 - beside this file, which mkdocs loads by its path

EMPTY = re.compile(r"<th([^>]*)></th>")
DIALOG = 'data-md-component="search" role="dialog"'
# Roles of docstrings, as Sphinx writes them: here they are code.
ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):(?=<code>|`)")


def on_config(config: Any) -> Any:
    """Put the pages of the program at the end of the menu."""
    config.nav.append(reference.menu())
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Take the roles from docstrings, and make headings of tables that say nothing plain cells."""
    return EMPTY.sub(r"<td\1></td>", ROLE.sub("", html))


def on_post_page(output: str, **_: Any) -> str:
    """Name the theme's dialog of the search, for those who hear the page."""
    return output.replace(DIALOG, f'{DIALOG} aria-label="Search"')


on_post_template = on_post_page  # 404.html is a template, and not a page


def on_files(files: Files, config: Any) -> Files:
    """Add the front page, and every file outside of docs/ that a page or the menu links to."""
    files.append(File.generated(config, "index.md", content=_moved((ROOT / "README.md").read_text(), "")))
    # Pages of packages link to each other, so what is added is looked at as well.
    todo = {target for path in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"] for target in _targets(path)}
    todo |= set(re.findall(rf"{BESIDE}/(\S+)", (ROOT / "mkdocs.yml").read_text()))
    done: set[str] = set()
    while todo - done:
        target = min(todo - done)
        done.add(target)
        path = ROOT / target
        name = f"{BESIDE}/{target}"
        if path.suffix == ".md":
            todo |= _targets(path)
            folder = posixpath.dirname(target)
            files.append(File.generated(config, name, content=_moved(path.read_text(), folder, name)))
        else:
            files.append(
                File.generated(config, name + ".txt" * (path.suffix in PLAIN), content=path.read_bytes())
            )
    for name, text in reference.pages().items():
        files.append(File.generated(config, f"{reference.FOLDER}/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of docs/ to files beside it into links within the site."""
    if page.file.generated_by:
        return markdown
    return _moved(markdown, posixpath.dirname(f"docs/{page.file.src_uri}"), page.file.src_uri)


def _targets(path: Path) -> set[str]:
    """Return what a page links to outside of docs/, from the root."""
    folder = path.parent.relative_to(ROOT).as_posix()
    found = {
        posixpath.normpath(posixpath.join(folder, target)) for _, target, _ in LINK.findall(path.read_text())
    }
    return {
        name
        for name in found
        if not name.startswith(("docs/", RESEARCH)) and name != "README.md" and (ROOT / name).is_file()
    }


def _moved(text: str, folder: str, page: str = "index.md") -> str:
    """Return a page with its links, which are relative to ``folder`` of the repository, relative to ``page``."""

    def move(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        name = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / name).is_file():
            return found[0]
        if name == "README.md":
            name = "index.md"
        elif name.startswith("docs/"):
            name = name.removeprefix("docs/")
        else:
            name = f"{BESIDE}/{name}" + ".txt" * (Path(name).suffix in PLAIN)
        return before + posixpath.relpath(name, posixpath.dirname(page) or ".") + after

    def name_research(found: re.Match[str]) -> str:
        name = posixpath.normpath(posixpath.join(folder, found[2]))
        return f"{found[1]} (`{name}` of the source)" if name.startswith(RESEARCH) else found[0]

    return LINK.sub(move, WHOLE.sub(name_research, text))
