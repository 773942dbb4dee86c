"""Print errors in the command line in the same form as all other errors: the expected and the actual value."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args, get_origin

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts import ValidationError as BoundError
from cyclopts.argument import Argument, ArgumentCollection
from rich.text import Text

from sinew.cli.settings import SET, option_name
from sinew.cli.verbs import WITHIN
from sinew.core import did_you_mean

# Key: flag that was moved to another command. Value: the command and flag that a user types now.
MOVED_FLAGS = {("sinew run", "--trials"): "sinew trials --scenes"}
KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def whole(_app: object, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Reject a fraction for a flag with whole numbers, because the parser would round 10.7 to 11."""
    for argument in arguments:
        for token in argument.tokens:
            if "." in token.value and _kind(argument.hint) == KINDS[int]:
                raise CoercionError(token=token, target_type=int, argument=argument)


def shown(error: CycloptsError) -> Text:
    return Text.assemble(("error:", "bold red"), " ", message_of(error))


def message_of(error: CycloptsError) -> str:
    """Return the message of an error, with the expected and the actual value. Rare errors have the parser's message."""
    token_in_error = getattr(error, "token", None)
    verb = " ".join(("sinew", *(error.command_chain or ())))
    if isinstance(error, UnknownOptionError):
        names = [name for each in error.argument_collection if each.parse for name in each.names]
        flag = (error.token.keyword or error.token.value).partition("=")[0]
        if moved := MOVED_FLAGS.get((verb, flag)):
            return f"unknown flag {flag}: it is now `{moved}`"
        hint = did_you_mean(flag, names).removeprefix(";").replace("'", "") or f" see `{verb} --help`"
        for each in error.argument_collection:
            if not each.show:  # a setting has no flag
                hint = hint.replace(f" {each.name}?", f" --set {option_name(each)}=VALUE?")
        return f"unknown flag {flag}:{hint}"
    if isinstance(error, UnknownCommandError) and error.unused_tokens and error.app:
        return _no_verb(error.unused_tokens[0], list(error.app), bool(error.command_chain))
    if type(error) is UnusedCliTokensError:
        return f"expected no further words, got {' '.join(error.unused_tokens or ())}; see `{verb} --help`"
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword}: expected once, got it again; pass it once"
    if (argument := error.argument) is None:
        return str(error)
    name = (
        getattr(error, "keyword", None) or getattr(token_in_error, "keyword", None) or option_name(argument)
    )
    source = "" if token_in_error is None else token_in_error.source
    # Any other source is a settings file, so name it.
    if source not in ("", "cli", "env", SET):
        name = f"{source}: {name}"
    if type(error) is MissingArgumentError and not argument.show:
        return f"{name} was moved: use --set {option_name(argument)}=VALUE"
    if type(error) is MissingArgumentError:
        return f"{name} is required ({_meaning(error, argument)}); see `{verb} --help`"
    if isinstance(error, CoercionError) and error.msg is None and token_in_error is not None:
        kind = _kind(error.target_type)
        close = did_you_mean(token_in_error.value, kind.removeprefix("one of ").split(", "))
        return f"{name}: expected {kind}, got {token_in_error.value!r}{close}"
    if isinstance(error, BoundError) and (
        bound := re.fullmatch(r"Must be (.+?)\.?", error.exception_message)
    ):
        token = argument.tokens[0]
        return f"{token.keyword or name}: expected a number {bound[1]}, got {token.value}"
    return str(error)


def _no_verb(word: str, names: list[str], within: bool) -> str:
    """Return the error message about a word that is not a command. The function does not import any command.

    Args:
        word: The word.
        names: Names of commands and flags that are possible instead.
        within: True if the word follows the name of a group.
    """
    if word.startswith("-"):
        hint = did_you_mean(word, ("--json", "--debug", "--config", *names)).removeprefix("; ")
        return f"unknown flag {word}: {hint or 'put flags of a command after its name, see `sinew COMMAND --help`'}"
    verbs = [each for each in names if not each.startswith("-")]
    moved = "" if within or word not in WITHIN else f"it is `sinew {WITHIN[word]}`"
    hint = moved or did_you_mean(word, verbs).removeprefix("; ") or f"expected one of {', '.join(verbs)}"
    return f"unknown command {word!r}: {hint}"


def _meaning(error: MissingArgumentError, argument: Argument) -> str:
    """Describe a missing value by its type. For a general type, use the first clause of its help."""
    kind, word = _kind(argument.hint), argument.field_info.name
    help_text = re.search(rf"^ +{word}: ((?:[^;:.]|\.\b)+)", inspect.getdoc(error.target) or "", re.MULTILINE)
    if kind != "a value" or not help_text:
        return kind
    text = " ".join(help_text[1].split())
    return text if text[:2].isupper() else text[0].lower() + text[1:]


def _kind(hint: Any) -> str:
    """Return the form of a type's values as text, such as "a whole number"."""
    if get_origin(hint) is not None and (
        kinds := [each for each in get_args(hint) if each is not type(None)]
    ):
        return f"one of {', '.join(map(str, kinds))}" if isinstance(kinds[0], str) else _kind(kinds[0])
    return KINDS.get(hint, "a value")
