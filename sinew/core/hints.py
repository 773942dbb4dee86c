"""Spell options in messages for their reader: a Python program, the command line, or a client of a server.

Only this module decides the spelling. The command line and a server announce themselves. The default is Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from sinew.core import SinewError

Reader = Literal["python", "command line", "client"]
# Options of sinew.load with another name on the command line; the value is that name.
_FLAGS = {"providers": "provider"}
_without_flags: frozenset[str] = frozenset()
_reader: Reader = "python"  # one for the whole process, because any thread may raise the message


@contextlib.contextmanager
def read_by(reader: Reader) -> Iterator[None]:
    """Inside the ``with`` block, write options in messages in the form for this reader: as Python arguments or as
    command-line flags."""
    global _reader  # noqa: PLW0603 - one process, one reader
    before, _reader = _reader, reader
    try:
        yield
    finally:
        _reader = before
        without_flags(())


def without_flags(names: Iterable[str]) -> None:
    """Write the options of these names as ``--set NAME=VALUE`` in messages, because the present command has no such
    flags. The names have hyphens."""
    global _without_flags  # noqa: PLW0603 - one process, one command
    _without_flags = frozenset(names)


def short_reason(reason: str) -> str:
    """Return the first clause of an engine's reason. The rest is about other engines and measurements. ``sinew doctor``
    and ``sinew serve --verbose`` print the complete reason."""
    return reason.partition("; ")[0]


def option(name: str, value: Mapping[str, str] | Sequence[str] | str | Literal[True] = True) -> str:
    """Return an option of :func:`sinew.load` with its value, as the user of this process would type it: in Python or on
    the command line.

    Args:
        name: Name of the option.
        value: Its value. True means an option without a value (a switch).

    >>> option("rename", {"front": "camera1"})
    "rename={'front': 'camera1'}"
    """
    if _reader == "python":
        shown = dict(value) if isinstance(value, Mapping) else value
        return f"{name}={shown!r}"
    name = _FLAGS.get(name, name)
    flag = f"--{name.replace('_', '-')}"
    values: Sequence[str]
    if isinstance(value, Mapping):
        values = [f"{new}={old}" for new, old in value.items()]
    elif value is True:
        values = []
    else:
        values = [value] if isinstance(value, str) else value
    if _reader == "command line" and name.replace("_", "-") in _without_flags:
        return " ".join(f"--set {name}={each}" for each in values or ["true"])
    text = " ".join(f"{flag} {each}" for each in values) or flag
    return text if _reader == "command line" else f"`sinew serve ... {text}`"


def choice(python: str, flags: str) -> str:
    """Return ``python`` if the user of this process calls Sinew from Python, ``flags`` if the user is on the command
    line."""
    return python if _reader == "python" else flags


def pairs(flag: str, form: str, texts: Iterable[str]) -> dict[str, str]:
    """Parse the values of a flag that may be repeated, each in the form ``NAME=VALUE``. Return a dict: name -> value.

    Args:
        flag: The flag.
        form: The form of a value, for messages.
        texts: The values.

    Raises:
        SinewError: A value does not have this form, or a name occurs twice.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise SinewError(f"{flag} {text}: expected {form}")
        if name in values:
            raise SinewError(
                f"{flag} {text}: {name} is another {flag.removeprefix('--')}'s name; choose another"
            )
        values[name] = value
    return values
