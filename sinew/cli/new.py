"""``sinew new family``: a package of somebody's own that works before a line of it is changed."""

from __future__ import annotations

import keyword
import os
import re
import shlex
import tempfile
from importlib.util import find_spec
from pathlib import Path

from sinew.cli import terminal
from sinew.core import SinewError
from sinew.registry import families, plain

TEMPLATE = Path(__file__).parent / "templates" / "family"
SUFFIX = "-tpl"  # of a template's programs, so that nothing takes them for modules of this package
FORM = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
MOST = 50  # characters of a name, which files and classes carry


def family(name: str, /, *, out: Path | None = None) -> int:
    """Write a package for a family of policies of your own: its model, its converter and the test that it passes.

    Sinew finds it by its entry point once it is installed; nothing of Sinew is changed.

    Args:
        name: of the family, its architecture and its package: small letters and digits, words joined by `_`.
        out: the folder to write, which may not be there yet; the name, with hyphens, if absent.
    """
    check(name)
    folder = Path(name.replace("_", "-")) if out is None else out
    write(name, folder)
    console, place = terminal.console(markup=False), folder if folder.is_absolute() else f"./{folder}"
    console.print(f"{folder}/: the family {name}, which works as it is:")
    for line in (
        f"pip install -e {shlex.quote(f'{place}[test]')}",
        f"python -m pytest {shlex.quote(str(place))}",
        f"python -m {name}.checkpoint random/  # a checkpoint with random weights",
        f"sinew convert random/ {name}.gguf",
        f"sinew bench {name}.gguf",
    ):
        console.print(f"  {line}", soft_wrap=True)
    console.print("README.md there says what to exchange for yours, in which order.")
    terminal.emit({"family": name, "folder": str(folder)})
    return 0


def check(name: str) -> None:
    """Raise :class:`SinewError` unless a family, its package and its classes may have this name."""
    if not FORM.fullmatch(name) or len(name) > MOST:
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        hint = f"; did you mean {near!r}?" if near != name and FORM.fullmatch(near) else ""
        form = f"at most {MOST} small letters and digits, words joined by '_'"
        raise SinewError(f"name: expected {form}, got {name!r}{hint}")
    for known in families():
        words = (known.name, *known.models, *known.published())
        if plain(name) in map(plain, words):
            raise SinewError(f"name: expected one that no family has, got {name!r}, which {known.name} has")
    if keyword.iskeyword(name) or (TEMPLATE / name).exists() or find_spec(name) is not None:
        raise SinewError(f"name: expected one that Python has no package or word of, got {name!r}")


def write(name: str, folder: Path) -> None:
    """Write the template under a family's name, all of it or nothing. Raises :class:`SinewError` for a folder that is
    there."""
    if os.path.lexists(folder):
        raise SinewError(f"{folder}: expected a new folder, got one that is there; --out names another")
    names = {
        "family_name": name,
        "family-name": name.replace("_", "-"),
        "FamilyName": "".join(map(str.capitalize, name.split("_"))),
    }

    def named(text: str) -> str:
        return re.sub("|".join(names), lambda found: names[found[0]], text)

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as partial:
        made = Path(partial) / "made"  # which has the modes of any other
        for source in sorted(TEMPLATE.rglob("*")):
            if source.is_file():
                place = source.relative_to(TEMPLATE).as_posix().removesuffix(SUFFIX)
                target = made / named(place)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(named(source.read_text(encoding="utf-8")), encoding="utf-8")
        made.rename(folder)
