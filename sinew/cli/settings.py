"""Options from the environment and from a file: ``SINEW_SERVE_HOST``, or ``host = "0.0.0.0"`` under ``[serve]``.

A few commands have more options than flags. The options without a flag are called settings. On the command line,
``--set NAME=VALUE`` sets a setting, and ``--settings`` lists the settings of the command.

The command line has priority over the environment, and the environment over the file. A name that is not an option of
its command is an error. The names of the used options are printed on standard error. Their values are not printed,
because a value may be a key.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from cyclopts import App, Token
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.config import Dict, Env
from rich.markup import escape
from rich.table import Table
from sinew_client.addresses import split_scheme
from sinew_client.untrusted import read_toml, shown

from sinew.cli.verbs import groups_of
from sinew.core import SinewError, did_you_mean, hints, progress

PREFIX = "SINEW_"
SERVICE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
FILE = f"{PREFIX}CONFIG"
TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
SET, LIST = "--set", "--settings"  # flags of the commands that have settings


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
                raise SinewError("--config: expected a .toml file, got nothing; pass --config FILE.toml")
        else:
            remaining.append(token)
    tokens[:end] = remaining
    return None if name is None else Path(name)


def sources(file: Path | None, verbs: Iterable[str]) -> tuple[Callable[..., None], ...]:
    """Return the sources of options in addition to the command line (environment and settings file), in order of
    priority.

    Args:
        file: The settings file; None if there is none.
        verbs: The names of all commands.

    Raises:
        SinewError: The file cannot be read, or a section is not a command.
    """
    files = () if file is None else (SettingsFile.read(file, verbs),)
    return (from_command_line, from_environment, *files)


class SettingsListing(Exception):  # noqa: N818 - the user requested this output
    """Ends the parsing of a command line with ``--settings``. Its argument is the table to print."""


def from_command_line(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Read ``--set NAME=VALUE``, for a command that has settings.

    Raises:
        SettingsListing: The command line has ``--settings``.
        SinewError: A name is unknown or was set twice, or a setting was typed as a flag.
    """
    by_name = {argument.name: argument for argument in arguments}
    if LIST not in by_name:
        return
    if by_name[LIST].has_tokens:
        described = app.assemble_argument_collection(parse_docstring=True)
        raise SettingsListing(_listing(" ".join(commands), described))
    options = flags(arguments)
    hints.without_flags(name for name, option in options.items() if not option.show)
    typed = [token for option in options.values() if not option.show for token in option.tokens]
    if typed:
        names = ", ".join(dict.fromkeys(str(token.keyword) for token in typed))
        uses = " ".join(_set_form(token) for token in typed)
        raise SinewError(f"{names} {'was' if ',' not in names else 'were'} moved: use {uses}")
    for token in by_name[SET].tokens:
        name, equals, value = token.value.partition("=")
        name = name.strip().replace("_", "-")
        if not equals:
            raise SinewError(f"{SET} {token.value}: expected NAME=VALUE, such as {SET} substeps=2")
        if (argument := options.get(name)) is None:
            near = did_you_mean(name.replace("-", "_"), (each.replace("-", "_") for each in options))
            raise SinewError(
                f"{SET} {token.value}: `sinew {' '.join(commands)}` has no setting of this name"
                f"{near or f'; `sinew {commands[0]} {LIST}` lists the settings'}"
            )
        repeatable = argument.token_count()[1]
        if argument.has_tokens and not (repeatable and argument.tokens[0].source == SET):
            raise SinewError(f"{SET} {token.value}: expected {option_name(argument)} once, got it again")
        keyword = f"{SET} {name.replace('-', '_')}"
        argument.append(Token(keyword=keyword, value=value, source=SET, index=len(argument.tokens)))
    by_name[SET].tokens.clear()


def option_name(argument: Argument) -> str:
    """Return an option as a user writes it: a flag with dashes, or the name of a setting."""
    return argument.name if argument.show else argument.name.removeprefix("--").replace("-", "_")


def _set_form(token: Token) -> str:
    """Return a flag that is now a setting in the form ``--set NAME=VALUE``."""
    name, value = str(token.keyword).removeprefix("--"), token.value
    if not isinstance(token.implicit_value, bool):
        return f"{SET} {name.replace('-', '_')}={shlex.quote(value)}"
    return f"{SET} {name.removeprefix('no-').replace('-', '_')}={str(token.implicit_value).lower()}"


def _type(hint: Any) -> str:
    """Return the type of a setting's values in words."""
    inner = [each for each in get_args(hint) if each not in (type(None), ...)]
    if get_origin(hint) is Literal:
        return "choice"
    if get_origin(hint) is tuple:
        return f"{_type(inner[0])}, repeatable"
    return _type(inner[0]) if inner else TYPES[hint]


def _listing(command: str, arguments: ArgumentCollection) -> Table:
    """Return a table of a command's settings by group, with types, defaults and the first sentence of the help."""
    table = Table.grid(padding=(0, 2))
    table.title = (
        f"Settings of `sinew {command}`: use {SET} NAME=VALUE, or NAME = VALUE below \\[{command}] in a file"
    )
    table.title_justify = "left"
    table.title_style = "bold"
    groups: dict[str, list[Argument]] = {}
    for argument in flags(arguments).values():
        if not argument.show:
            groups.setdefault(argument.parameter.group[0].name, []).append(argument)
    for title, members in groups.items():
        table.add_row("")
        table.add_row(f"[bold]{title}[/]")
        for argument in members:
            text = re.split(r"(?<=[.]) (?=[A-Z])", " ".join((argument.parameter.help or "").split()))[0]
            if choices := argument.get_choices():
                text += f" [choices: {', '.join(choices)}]"
            if (default := argument.field_info.default) not in ((), "", None):
                text += f" [default: {str(default).lower() if isinstance(default, bool) else default}]"
            table.add_row(f"  {option_name(argument)}", _type(argument.hint), escape(text))
    return table


def from_environment(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Read the variables ``SINEW_VERB_FLAG``. Lists are separated by spaces, and switches are 1 or 0."""
    if not commands:
        return
    prefix = _prefix(commands)
    variables = {prefix + name.upper().replace("-", "_"): name for name in flags(arguments)}
    for variable, value in os.environ.items():
        # Kubernetes sets variables for each Service in every pod. If a Service is called `sinew-serve`, its variables
        # look like flags.
        by_kubernetes = SERVICE.search(variable) or (variable.endswith("_PORT") and split_scheme(value)[0])
        if variable not in variables and by_kubernetes:
            continue
        if variable.startswith(prefix) and variable not in variables:
            raise SinewError(
                f"{variable}: `sinew {' '.join(commands)}` has no such flag{did_you_mean(variable, variables)}"
            )
        for group, members in groups_of(commands):
            inside = tuple(_prefix((*group, each)) for each in members)
            if variable.startswith(_prefix(group)) and not variable.startswith(inside):
                names = ", ".join(f"{each}..." for each in inside)
                raise SinewError(f"{variable}: expected a flag of a command in this group, {names}")
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
        """Read the flags of commands from a TOML file.

        Raises:
            SinewError: The file cannot be read, or is not valid TOML.
        """
        try:
            tables = read_toml(path)
        except (OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) else error
            raise SinewError(
                f"--config {path}: expected a TOML file, got {words}; correct the file"
            ) from None
        verbs = tuple(verbs)
        for name, table in tables.items():
            if name not in verbs:
                raise SinewError(
                    f"{path}: {name}: expected a table with the name of a command{did_you_mean(name, verbs)}"
                )
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
                    raise SinewError(
                        f"{where}: expected a table with the name of a command{did_you_mean(key, members)}"
                    )
        table = table.get(commands[-1], {}) if commands else {}
        if not table:
            return
        allowed, values = flags(arguments), {}
        for key, value in table.items():
            where = f"{self.path}: [{'.'.join(commands)}] {key}"
            name = key.replace("_", "-")
            if name in values:
                raise SinewError(f"{where}: this flag occurs twice, with - and with _; remove one of the two")
            if name not in allowed:
                raise SinewError(
                    f"{where}: `sinew {' '.join(commands)}` has no such flag{did_you_mean(name, allowed)}"
                )
            if not _plain(value):
                raise SinewError(f"{where}: expected a text, a number, true or false, or a list of them")
            values[name] = value
        for word in reversed(commands):
            values = {word: values}
        with _telling(arguments, str(self.path)):
            Dict(values, source=str(self.path))(app, commands, arguments)


def flags(arguments: ArgumentCollection) -> dict[str, Any]:
    """Return all options of a command, as a dict: name without dashes -> argument. ``--set`` is not an option."""
    names = [argument.name for argument in arguments]
    return {
        argument.name.removeprefix("--"): argument
        for argument in arguments
        if argument.name.startswith("--") and not argument.children
        if not (LIST in names and argument.name in (SET, LIST))
    }


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(not isinstance(each, list) and _plain(each) for each in value)
    return isinstance(value, str | int | float)  # includes bool, which is a subclass of int


@contextmanager
def _telling(arguments: ArgumentCollection, source: str) -> Iterator[None]:
    before = {name for name, argument in flags(arguments).items() if argument.has_tokens}
    yield
    new = [
        option_name(argument)
        for name, argument in flags(arguments).items()
        if argument.has_tokens and name not in before
    ]
    if new:
        progress.say(f"from {source}: {', '.join(new)}")
