"""A hook of mkdocs, which adds pages to the site.

README.md becomes the front page. Files outside of docs/ become part of the site if a page links to them. reference.py
adds the pages that are made from the code.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
BESIDE = "repository"  # the folder of the site for files outside of docs/
LINK = re.compile(r"(\]\()([^)#\s:]+)([^)]*\))")
WHOLE = re.compile(r"\[([^\[\]]*)\]\(([^)#\s:]+)[^)]*\)")
# The browser shows files with these suffixes as text. Otherwise it would download them.
PLAIN = {"", ".sh", ".service"}
RESEARCH = "research/"  # this folder is not part of the site: a link into it becomes the name of its target


sys.path.insert(0, str(Path(__file__).parent))
import reference  # noqa: E402 - the path of this folder is set above

EMPTY = re.compile(r"<th([^>]*)></th>")
DIALOG = 'data-md-component="search" role="dialog"'
# Roles in docstrings, in the notation of Sphinx. The site shows their targets as code.
ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):(?=<code>|`)")


def on_config(config: Any) -> Any:
    """Append the generated pages (reference.py) to the menu."""
    config.nav.append(reference.menu())
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Remove the roles of docstrings, and make plain cells of the empty header cells of tables."""
    return EMPTY.sub(r"<td\1></td>", ROLE.sub("", html))


def on_post_page(output: str, **_: Any) -> str:
    """Give the search dialog of the theme a label for screen readers."""
    return output.replace(DIALOG, f'{DIALOG} aria-label="Search"')


on_post_template = on_post_page  # mkdocs makes 404.html from a template and not from a page


def on_files(files: Files, config: Any) -> Files:
    """Add the front page, and each file outside of docs/ to which a page or the menu links."""
    files.append(File.generated(config, "index.md", content=_moved((ROOT / "README.md").read_text(), "")))
    # The pages of packages link to more files, so the links of each added page are followed too.
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
    """Replace the links from docs/ to files outside of docs/ by links within the site."""
    if page.file.generated_by:
        return markdown
    return _moved(markdown, posixpath.dirname(f"docs/{page.file.src_uri}"), page.file.src_uri)


def _targets(path: Path) -> set[str]:
    """Return the files outside of docs/ to which a page links, relative to the root of the repository."""
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
    """Rewrite the links of a page. They are relative to ``folder`` of the repository, and become relative to
    ``page``."""

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
        return f"{found[1]} (`{name}` in the repository)" if name.startswith(RESEARCH) else found[0]

    return LINK.sub(move, WHOLE.sub(name_research, text))
