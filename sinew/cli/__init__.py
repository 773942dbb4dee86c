"""The command line ``sinew COMMAND``. Each command has its own file, which is imported when the command is used.

A command is a plain function with a typed signature. Its result is the exit code (None is 0). It raises
:class:`sinew.core.SinewError` for all errors that a user can fix.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError, Group, Parameter
from rich.console import Console
from rich.markup import escape
from sinew_client.documentation import page

from sinew import __version__
from sinew.cli import settings, terminal, usage
from sinew.cli.status import EXIT_BROKEN_PIPE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE
from sinew.cli.verbs import SECTIONS, VERBS, Verb, absent, function_of
from sinew.core import SinewError, hints, progress, providers
from sinew.core.extras import MissingPackageError


def build_app(config: Path | None = None, words: Sequence[str] = ()) -> App:
    """Build the program.

    Args:
        config: File with flags of commands.
        words: The words of a command line. The help of its command is the complete docstring. All other commands have
            only their summary, so that their modules are not imported.
    """
    app = App(
        name="sinew",
        help="Real-time inference for vision-language-action policies.",
        help_epilogue=(
            "`sinew COMMAND --help` shows the flags of a command and an example. `--json` prints the result as JSON."
            " `--json FILE.json` prints the result as text and writes it to the file as JSON. `--debug` (or"
            " SINEW_DEBUG=1) shows the traceback of an error. You can also set every flag in the environment"
            " (SINEW_SERVE_HOST) or in a file (`--config FILE.toml` or SINEW_CONFIG, with `host` under `[serve]`)."
            f" The exit status is 0 if the command succeeded; {page('commands')} lists the others."
        ),
        version=__version__,
        group_parameters=Group("Options", sort_key=0),
        default_parameter=Parameter(show_default=_default),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        error_formatter=usage.shown,
        config=(*settings.sources(config, VERBS), usage.whole),
    )
    program = Group("Program", sort_key=len(SECTIONS))
    app.command(
        "sinew.cli.completion:completion",
        name="--completion",
        help="Print a script that completes commands and flags in your shell: --completion bash, zsh or fish.",
        version_flags=[],
    )
    for flag in ("--completion", "--help", "--version"):
        app[flag].group = program
    for order, (title, section) in enumerate(SECTIONS.items()):
        group = Group(title, sort_key=order)
        for place, (name, verb) in enumerate(section.items()):
            _add(app, (name,), verb, words, group=group, sort_key=place)
    return app


def _default(value: Any) -> str | None:
    """Return the default value of a flag as the help shows it; None for defaults that are empty or off, which are not
    shown.
    """
    return None if value in ((), [], "", None) or value is False else str(value)


def _add(app: App, words: tuple[str, ...], verb: Verb, line: Sequence[str], **options: Any) -> None:
    options |= {"name": words[-1], "version_flags": []}
    if verb.absent:
        how = providers.how_to_install(verb.package)
        app.command(_absent, help=f"{verb.summary} Not installed: {how}", **options)
        return
    if verb.commands or tuple(line[: len(words)]) != words:
        options["help"] = verb.summary
    if not verb.commands:
        app.command(function_of(words, verb), help_epilogue=f"Example: `sinew {verb.example}`", **options)
        return
    inner = App(**options)
    app.command(inner)
    for place, (word, each) in enumerate(verb.commands.items()):
        _add(inner, (*words, word), each, line, sort_key=place)


def _absent() -> None:
    """Stand in for a command whose distribution is not installed. `main` prints how to install it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code. ``argv`` contains the words after the program's name."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    debug = _take_flag(tokens, "--debug") or os.environ.get("SINEW_DEBUG", "") not in ("", "0")
    terminal.take_json(tokens)
    if tokens and tokens[0].startswith("--completion="):
        tokens[:1] = tokens[0].split("=", 1)
    errors = terminal.console(stderr=True, highlight=None)
    if tokens and tokens[0] == "help":
        tokens = [*tokens[1:], "--help"]
    if "--port" in tokens and tokens[0] == "serve":
        _print_error(
            errors,
            "--port: each protocol has its own port; pass --wire NAME:PORT instead, for example --wire http:8001",
        )
        return EXIT_USAGE
    if (there := absent(tokens)) is not None:
        words, verb = there
        _print_error(errors, str(providers.MissingDistributionError(f"sinew {words}", verb.package)))
        return EXIT_USAGE
    before = progress.listen(terminal.show_task), progress.tell(terminal.say)
    try:
        config = settings.take_config(tokens)
        with hints.read_by("command line"):
            result = build_app(config, tokens)(
                tokens, exit_on_error=False, console=terminal.console(), error_console=errors
            )
        return result if isinstance(result, int) else 0
    except settings.SettingsListing as listing:
        terminal.console().print(listing.args[0])
        return 0
    except CycloptsError:
        return EXIT_USAGE  # cyclopts has already printed the error in the arguments
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The program that reads the pipe has ended (`sinew inspect … | head`). Python flushes stdout once more at exit,
        # so give it a file that accepts all output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if debug:
            raise
        _print_error(errors, _words(error))
        return EXIT_ERROR
    finally:
        progress.listen(before[0])
        progress.tell(before[1])
        terminal.take_json([])  # a later command of this process must not inherit --json


def _words(error: Exception) -> str:
    """Return an error as one line for the user. An unexpected error is marked as a fault of this program."""
    if isinstance(error, SinewError):
        return str(error)
    if isinstance(error, ImportError) and isinstance(error.__cause__, ModuleNotFoundError):
        error = error.__cause__  # the parser imports a command's file, and wraps the error of that import
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("sinew."):
        return str(MissingPackageError("this command", error.name))
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror or error}"
    first = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, MemoryError) or re.search("failed to map segment|can't allocate memory", first):
        return f"this process needs more memory than it is allowed (ulimit -v, a cgroup): {first}; raise the limit"
    return f"{type(error).__name__}: {first} (a fault of this program; --debug shows where, please report it)"


def _print_error(console: Console, message: str) -> None:
    console.print(f"[bold red]error:[/] {escape(message)}", highlight=False)


def _take_flag(tokens: list[str], flag: str) -> bool:
    """Remove a flag from the words of a command line, at any position before ``--``. Return True if it was there."""
    end = tokens.index("--") if "--" in tokens else len(tokens)
    present = flag in tokens[:end]
    tokens[:end] = [token for token in tokens[:end] if token != flag]
    return present
