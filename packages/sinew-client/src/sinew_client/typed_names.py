"""Names in files from outside: code to import, files to open, addresses to contact.

A received file is data: a page, a gate, the plan of a farm, a recording, a manifest. A name in such a file is imported,
opened or contacted only if the user of this machine typed the same name. :func:`require_typed` checks this for all
readers, before anything is imported, opened or contacted.
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
# This pattern matches the folders of a path that begins at the root, a drive or the home folder. The path may be inside
# a longer text, after a quote, a bracket, a comma, an equals sign or a blank. So the pattern does not match texts such
# as `tcp://host` and `sinew/Blocks-v0`.
_FOLDERS = re.compile(
    r"""(?<![^\s'"=,(\[])((?:ipc://|file:(?://)?)?)(?:~[\\/]|(?:[A-Za-z]:)?[\\/](?=[^\s\\/]))(?:[^'"=,\\/\n]+[\\/])*"""
)


class UntypedNameError(ClientError):
    """A file from outside uses a name that nobody typed; the message lists the names and the options to type."""


@dataclass(frozen=True)
class OutsideName:
    """A name in a file from outside.

    Attributes:
        field: The field of the file, such as ``task.env``.
        value: The name as a text, or a JSON object of options that contain names.
        flag: The option with which a user types the name, such as ``--env``; "" for a positional argument.
        key: The text that is compared with the typed text; "" takes :func:`comparable` of ``value``.
    """

    field: str
    value: Any
    flag: str
    key: str = ""

    @property
    def compared(self) -> str:
        """The text that must be among the typed texts."""
        return self.key or comparable(self.value)

    @property
    def text(self) -> str:
        """The name for a message: one line of limited length."""
        text = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return named(text, LONGEST_SHOWN)


def require_typed(
    source: object, names: Sequence[OutsideName], typed: Mapping[str, Mapping[str, Any]]
) -> list[Any]:
    """Return the typed value for each name of a file, in the order of the names.

    Args:
        source: The file, for the message.
        names: All names in the file that are not built in.
        typed: Flag -> comparable text -> typed value; see :func:`typed_values`.

    Returns:
        The typed values.

    Raises:
        UntypedNameError: A name was not typed. Do not use any part of the file then.
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
    """Return typed values by the text that :func:`require_typed` compares, without absent values (None, "")."""
    return {comparable(value): value for value in values if value not in (None, "")}


def comparable(value: Any) -> str:
    """Return the text by which a typed and a recorded value are compared; folders are ignored."""
    return json.dumps(portable(value), sort_keys=True)


def portable(value: Any) -> Any:
    """Return a value for a record. Paths in its texts have no folders, because folders belong to one machine."""
    if isinstance(value, str):
        return _FOLDERS.sub(r"\1", value)
    if isinstance(value, Mapping):
        return {key: portable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(each) for each in value]
    return value


def file_name(path: str) -> str:
    """Return the last part of a path of any operating system."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] or path


def has_text(value: Any) -> bool:
    """Return True if a value of JSON holds a text, which may name code, a file or an address."""
    if isinstance(value, Mapping):
        return any(map(has_text, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_text, value))
    return isinstance(value, str)
