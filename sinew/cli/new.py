"""``sinew new``: write a package for the user to extend, which works before the user changes a line."""

from __future__ import annotations

import keyword
import os
import re
import shlex
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from sinew.cli import terminal
from sinew.cli.run_robot import EMBEDDED
from sinew.core import SinewError
from sinew.core.registry import families, plain
from sinew.engine.backend import BACKENDS
from sinew.serve.wires import WIRES
from sinew.steps.registry import IMAGE

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = "-tpl"  # a template's Python files have this suffix, so that they are not modules of this package
FORM = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
MOST = 50  # a name may have at most this many characters, because it becomes part of class names
# Kind of a package -> the group of its entry point, and the object to which the entry point refers.
KINDS = {
    "family": ("sinew.families", "our_name"),
    "engine": ("sinew.engines", "our_name:BACKEND"),
    "wire": ("sinew.wires", "our_name:WIRE"),
    "step": ("sinew.steps", "our_name:OurName"),
    "robot": ("sinew.robots", "our_name:OurName"),
    "task": ("sinew.tasks", "our_name:OurName"),
}


def new(
    kind: Literal["family", "engine", "wire", "step", "robot", "task"],
    name: str,
    /,
    *,
    out: Path | None = None,
) -> int:
    """Write your own package, which Sinew finds once it is installed, with a test that passes.

    Args:
        kind: What the package adds: family (a model and its converter), engine (runs models), wire (a client
            protocol of the server), step (processes camera frames), robot (for `sinew run --robot`), or task (for
            `sinew eval --env`).
        name: Name of the package and of the thing that it adds: lower-case letters, digits and `_`.
        out: Folder to write. It must not exist. Default: the name, with hyphens.
    """
    check(kind, name)
    folder = Path(name.replace("_", "-")) if out is None else out
    write(kind, name, folder)
    console, place = terminal.console(markup=False), folder if folder.is_absolute() else f"./{folder}"
    console.print(f"{folder}/: the {kind} {name}. It already works. To install and test it, run:")
    console.print(f"  pip install -e {shlex.quote(f'{place}[test]')}", soft_wrap=True)
    console.print(f"  python -m pytest {shlex.quote(str(place))}", soft_wrap=True)
    console.print("Comments in the files mark the code to replace with your own.")
    terminal.emit({"kind": kind, "name": name, "folder": str(folder)})
    return 0


def check(kind: str, name: str) -> None:
    """Raise :class:`SinewError` if a package of this kind, its extension or its classes cannot have this name."""
    if not FORM.fullmatch(name) or len(name) > MOST:
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        hint = f"; did you mean {near!r}?" if near != name and FORM.fullmatch(near) else ""
        form = f"at most {MOST} small letters and digits, words joined by '_'"
        raise SinewError(f"name: expected {form}, got {name!r}{hint}")
    owners: dict[str, Iterable[str]] = {
        each: (each,)
        for each in {"engine": BACKENDS, "wire": WIRES, "step": IMAGE, "robot": EMBEDDED}.get(kind, ())
    }
    if kind == "family":
        owners = {each.name: (each.name, *each.models, *each.published()) for each in families()}
    for owner, words in owners.items():
        if plain(name) in map(plain, words):
            raise SinewError(
                f"name: expected a name that no other {kind} has, got {name!r}, which {owner} has; choose another name"
            )
    if keyword.iskeyword(name) or (TEMPLATES / kind / name).exists() or find_spec(name) is not None:
        raise SinewError(
            f"name: expected no Python keyword and no installed package, got {name!r}; choose another name"
        )


def named(text: str, name: str) -> str:
    """Replace the placeholder names in a template's text with ``name`` in the same spelling."""
    names = {
        "our_name": name,
        "our-name": name.replace("_", "-"),
        "OurName": "".join(map(str.capitalize, name.split("_"))),
    }
    return re.sub("|".join(names), lambda match: names[match[0]], text)


def write(kind: str, name: str, folder: Path) -> None:
    """Write the template of a kind under a name, either completely or not at all.

    Raises:
        SinewError: The folder exists.
    """
    if os.path.lexists(folder):
        raise SinewError(f"{folder}: the folder already exists; choose another with --out")
    group, point = KINDS[kind]
    project = (TEMPLATES / "pyproject.toml").read_text("utf-8")  # own file: in an installed package
    extras = "torch,sim" if kind == "task" else "torch"
    texts = {"pyproject.toml": project.replace("OUR_KIND", kind).replace("OUR_EXTRAS", extras)}
    texts["pyproject.toml"] += f'\n[project.entry-points."{group}"]\nour_name = "{point}"\n'
    for source in sorted((TEMPLATES / kind).rglob("*")):
        if source.is_file():
            place = source.relative_to(TEMPLATES / kind).as_posix().removesuffix(SUFFIX)
            texts[place] = source.read_text("utf-8")  # own file: in an installed package
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as partial:
        # Write into a subfolder, because the temporary folder itself has restricted permissions.
        project_folder = Path(partial) / "made"
        for place, text in texts.items():
            target = project_folder / named(place, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(named(text, name), encoding="utf-8")
        project_folder.rename(folder)
