"""Flags from the environment and from a file: ``SINEW_SERVE_HOST=0.0.0.0``, or ``host = "0.0.0.0"`` under ``[serve]``.

The command line has priority over the environment, and the environment over the file. A variable or key that is not a
flag of its command is an error. The names of the used flags are printed on standard error. Their values are not
printed, because a value may be a key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import App
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Dict, Env
from sinew_client.untrusted import read_toml, shown

from sinew.cli.verbs import groups_of
from sinew.core import SinewError, did_you_mean, progress

PREFIX = "SINEW_"
SERVICE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
FILE = f"{PREFIX}CONFIG"


def take_config(tokens: list[str]) -> Path | None:
    """Remove ``--config FILE`` from a command line. Return the file, or else the file that SINEW_CONFIG names."""
    end = tokens.index("--") if "--" in tokens else len(tokens)
    name = os.environ.get(FILE) or None
    remaining, words = [], iter(tokens[:end])
    for token in words:
        if token.startswith("--config="):
            name = token.removeprefix("--config=")
        elif token == "--config":  # noqa: S105
            if (name := next(words, None)) is None:
                raise SinewError("--config: expected a .toml file, got nothing")
        else:
            remaining.append(token)
    tokens[:end] = remaining
    return None if name is None else Path(name)


def sources(file: Path | None, verbs: Iterable[str]) -> tuple[Callable[..., None], ...]:
    """Return the sources of options that the command line does not have, in order of priority.

    Raises:
        SinewError: The file cannot be read, or a section is not a command.
    """
    return (from_environment,) if file is None else (from_environment, SettingsFile.read(file, verbs))


def from_environment(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Read the variables ``SINEW_VERB_FLAG``. Lists are separated by spaces, and switches are 1 or 0."""
    if not commands:
        return
    prefix = _prefix(commands)
    variables = {prefix + name.upper().replace("-", "_"): name for name in flags(arguments)}
    for variable, value in os.environ.items():
        # Kubernetes sets variables for each Service in every pod. A Service may be called ``sinew-serve``.
        by_kubernetes = SERVICE.search(variable) or (variable.endswith("_PORT") and "://" in value)
        if variable not in variables and by_kubernetes:
            continue
        if variable.startswith(prefix) and variable not in variables:
            raise SinewError(
                f"{variable}: no flag of `sinew {' '.join(commands)}` is called so{did_you_mean(variable, variables)}"
            )
        for group, members in groups_of(commands):
            inside = tuple(_prefix((*group, each)) for each in members)
            if variable.startswith(_prefix(group)) and not variable.startswith(inside):
                names = ", ".join(f"{each}..." for each in inside)
                raise SinewError(f"{variable}: expected a flag of one of its commands, {names}")
    with _telling(arguments, "the environment"):
        Env(PREFIX)(app, commands, arguments)


def _prefix(commands: Iterable[str]) -> str:
    return PREFIX + "".join(f"{word}_".upper().replace("-", "_") for word in commands)


@dataclass(frozen=True)
class SettingsFile:
    """A file with a table of flags for each command, such as ``[serve]`` or ``[perf.run]``."""

    path: Path
    tables: dict[str, Any]

    @classmethod
    def read(cls, path: Path, verbs: Iterable[str]) -> SettingsFile:
        """Read a TOML file. Raises :class:`SinewError`."""
        try:
            tables = read_toml(path)
        except (OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) else error
            raise SinewError(f"--config {path}: expected a TOML file, got {words}") from None
        verbs = tuple(verbs)
        for name, table in tables.items():
            if name not in verbs:
                raise SinewError(f"{path}: {name}: expected a table of a command{did_you_mean(name, verbs)}")
            if not isinstance(table, dict):
                raise SinewError(f"{path}: {name}: expected a table [{name}], got {shown(table)}")
        return cls(path, tables)

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        table: Any = self.tables
        for group, members in groups_of(commands):
            table = table.get(group[-1], {})
            for key, value in table.items():
                if key not in members or not isinstance(value, dict):
                    where = f"{self.path}: [{'.'.join(group)}] {key}"
                    raise SinewError(f"{where}: expected a table of a command{did_you_mean(key, members)}")
        table = table.get(commands[-1], {}) if commands else {}
        if not table:
            return
        allowed, taken = flags(arguments), {}
        for key, value in table.items():
            where = f"{self.path}: [{'.'.join(commands)}] {key}"
            name = key.replace("_", "-")
            if name in taken:
                raise SinewError(f"{where}: expected one spelling, got it with - and with _")
            if name not in allowed:
                raise SinewError(
                    f"{where}: no flag of `sinew {' '.join(commands)}` is called so{did_you_mean(name, allowed)}"
                )
            if not _plain(value):
                raise SinewError(f"{where}: expected a text, a number, true or false, or a list of them")
            taken[name] = value
        for word in reversed(commands):
            taken = {word: taken}
        with _telling(arguments, str(self.path)):
            Dict(taken, source=str(self.path))(app, commands, arguments)


def flags(arguments: ArgumentCollection) -> dict[str, Any]:
    """Return the arguments of a command that are flags, by their names without dashes."""
    return {
        argument.name.removeprefix("--"): argument
        for argument in arguments
        if argument.name.startswith("--") and not argument.children
    }


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(not isinstance(each, list) and _plain(each) for each in value)
    return isinstance(value, str | int | float)  # bool is an int


@contextmanager
def _telling(arguments: ArgumentCollection, source: str) -> Iterator[None]:
    before = {name for name, argument in flags(arguments).items() if argument.has_tokens}
    yield
    new = [
        f"--{name}"
        for name, argument in flags(arguments).items()
        if argument.has_tokens and name not in before
    ]
    if new:
        progress.say(f"from {source}: {', '.join(new)}")
