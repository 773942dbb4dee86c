"""Protect the user from names in received files: code to import, files to open, addresses to contact.

A file from another person, such as a recording, an evaluation plan or a manifest, can contain names of Python objects,
files and servers. Sinew uses such a name only if the user of this machine has typed the same name as an option.
:func:`require_typed` checks this before Sinew imports, opens or contacts anything.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Sequence

from sinew_client.errors import ClientError
from sinew_client.untrusted import named

MOST_SHOWN = 8  # an error message lists at most this many names
LONGEST_SHOWN = 200  # longest name in an error message, characters
# This pattern matches the folders of a path that begins at the root, at a drive or at the home folder. The path may be
# inside a longer text, after a quote, a bracket, a comma, an equals sign or a blank. The pattern does not match texts
# such as `tcp://host` and `sinew/Blocks-v0`.
_FOLDERS = re.compile(
    r"""(?<![^\s'"=,(\[])((?:ipc://|file:(?://)?)?)(?:~[\\/]|(?:[A-Za-z]:)?[\\/](?=[^\s\\/]))(?:[^'"=,\\/\n]+[\\/])*"""
)


class UntypedNameError(ClientError):
    """A received file contains a name that the user has not typed. The message lists the names and their options."""


@dataclass(frozen=True)
class OutsideName:
    """A name in a received file.

    Attributes:
        field: The field of the file that contains the name, such as ``task.env``.
        value: The name as a text, or a JSON object of options that contain names.
        flag: The option with which the user types this name, such as ``--env``; "" for a positional argument.
        key: The text that is compared with the typed text; "" takes :func:`comparable` of ``value``.
    """

    field: str
    value: Any
    flag: str
    key: str = ""

    @property
    def compared(self) -> str:
        """The text that must be equal to a typed text."""
        return self.key or comparable(self.value)

    @property
    def text(self) -> str:
        """The name for an error message: one line of limited length."""
        text = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return named(text, LONGEST_SHOWN)


def require_typed(
    source: object, names: Sequence[OutsideName], typed: Mapping[str, Mapping[str, Any]]
) -> list[Any]:
    """Check that the user has typed all names of a received file.

    Args:
        source: The file, for the error message.
        names: All names in the file, except built-in names.
        typed: For each option, the typed values by their comparable text (:func:`typed_values`).

    Returns:
        For each name, the value that the user typed.

    Raises:
        UntypedNameError: The user has not typed a name. Do not use any part of the file then.
    """
    missing = [name for name in names if name.compared not in typed.get(name.flag, {})]
    if missing:
        listed, more = missing[:MOST_SHOWN], len(missing) - MOST_SHOWN
        fields = ", ".join(f"{name.field} {name.text}" for name in listed)
        words = dict.fromkeys(f"{name.flag} {shlex.quote(name.text)}".strip() for name in listed)
        rest = f" and {more} more" if more > 0 else ""
        raise UntypedNameError(
            f"{named(str(source), LONGEST_SHOWN)}: expected only built-in names, or names that you type yourself, got"
            f" {fields}{rest}. Sinew imports, opens and contacts nothing that only a file names. If you trust them,"
            f" add: {' '.join(words)}"
        )
    return [typed[name.flag][name.compared] for name in names]


def typed_values(values: Iterable[Any]) -> Mapping[str, Any]:
    """Return the values of an option by their comparable text, for :func:`require_typed`. Skip None and ""."""
    return {comparable(value): value for value in values if value not in (None, "")}


def comparable(value: Any) -> str:
    """Convert a value to the text that is compared: JSON without the folders of paths."""
    return json.dumps(portable(value), sort_keys=True)


def portable(value: Any) -> Any:
    """Remove the folders of all paths in a value, because folders exist only on one machine. Return the new value."""
    if isinstance(value, str):
        return _FOLDERS.sub(r"\1", value)
    if isinstance(value, Mapping):
        return {key: portable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(each) for each in value]
    return value


def file_name(path: str) -> str:
    """Return the last part of a path, with the separators of any operating system."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] or path


def has_text(value: Any) -> bool:
    """Return True if a JSON value contains a text, because a text may name code, a file or an address."""
    if isinstance(value, Mapping):
        return any(map(has_text, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_text, value))
    return isinstance(value, str)
