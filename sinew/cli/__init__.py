"""The command line: ``sinew VERB``. One file per verb, imported when it is used.

A verb is a plain function with a typed signature; what it returns is the exit code (None is 0). It raises
:class:`sinew.core.SinewError` for everything a user can mend.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App, CycloptsError
from rich.console import Console
from rich.markup import escape

from sinew import __version__, hints, progress
from sinew.cli import settings, terminal
from sinew.cli.status import EXIT_BROKEN_PIPE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE
from sinew.core import SinewError, did_you_mean
from sinew.extras import MissingPackageError

VERBS = {
    "convert": "Turn an upstream checkpoint into one bundle file.",
    "inspect": "Print what a bundle holds.",
    "infer": "Run a bundle once on image files and a state.",
    "quantize": "Choose a precision per component and measure what it costs.",
    "upgrade": "Rewrite a bundle of an older format in the present one.",
    "export": "Write a folder that runs without torch, or vla.cpp's file.",
    "serve": "Serve a bundle over the network.",
    "fleet": "Serve policies on replicas of a Ray cluster.",
    "top": "Show what a server does, in the terminal.",
    "client": "Send observations to a server and print a latency table.",
    "dataset": "Write a LeRobot data set of episodes or a recording.",
    "mcap": "Write a recording for Foxglove or PlotJuggler.",
    "rrd": "Write a recording for Rerun.",
    "run": "Drive a robot with a policy.",
    "stream": "Drive a robot with a stream: no chunk is ever waited for.",
    "bench": "Time a bundle, stage by stage.",
    "eval": "Run a policy in closed loop and count successes.",
    "leaderboard": "Rank evaluations, with intervals and paired differences.",
    "perf": "Predict latency, rates and memory on any machine.",
    "prepare": "Make, prove and measure the faster form of a bundle.",
    "validate": "Prove that an engine computes a bundle as the reference does.",
    "pull": "Fetch a policy of the hub, for later.",
    "push": "Upload a bundle to the hub, with a card.",
    "list": "List the checkpoints that were converted on first use.",
    "show": "Print what the cache knows of one of them.",
    "rm": "Remove some of them.",
    "doctor": "Check the installation and this machine.",
    "demo": "Run the trained demo policy in closed loop.",
}

FUNCTIONS = {
    "list": "cache:list_entries",
    "show": "cache:show",
    "rm": "cache:remove",
    "pull": "hub:pull",
    "push": "hub:push",
    "rrd": "mcap:rrd",
}  # others are named as their file
GROUPS = {"fleet", "perf"}  # verbs with commands of their own


def function_of(verb: str) -> str:
    """Return the module in this package and the function of a verb, as ``serve:serve``."""
    return FUNCTIONS.get(verb, f"{verb}:{verb}")


def build_app(config: Path | None = None) -> App:
    """Return the program. config: a file with flags of verbs."""
    app = App(
        name="sinew",
        help="Real-time inference for vision-language-action policies.",
        help_epilogue=(
            "`--json` prints a result as JSON alone, `--json FILE.json` writes it beside the text; in a pipe it is the"
            " last line. `--debug` (or SINEW_DEBUG=1) shows the traceback of an error. Every flag of a verb can also"
            " come from the environment (SINEW_SERVE_HOST) or from `--config FILE.toml` (SINEW_CONFIG): `host` under"
            " `[serve]`. Exit status: 0 as asked, 1 an error or a gate that failed, 2 a wrong flag, 3 it came to its"
            " end but something inside failed, 70 a server that wants to be started again, 130 interrupted, 141 nobody"
            " reads what it prints."
        ),
        version=__version__,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        config=settings.sources(config, VERBS),
    )
    for order, (verb, summary) in enumerate(VERBS.items()):
        options = {"help": summary} if verb in GROUPS else {"help": summary, "version_flags": []}
        app.command(f"sinew.cli.{function_of(verb)}", name=verb, sort_key=order, **options)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Arguments are those after the program's name."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    debug = _take_flag(tokens, "--debug") or os.environ.get("SINEW_DEBUG", "") not in ("", "0")
    terminal.take_json(tokens)
    errors = terminal.console(stderr=True, highlight=None)
    if tokens and not tokens[0].startswith("-") and tokens[0] not in VERBS:
        # Checked here because cyclopts would import every verb, torch with them, to word its own message.
        hint = did_you_mean(tokens[0], VERBS).removeprefix("; ") or f"expected one of {', '.join(VERBS)}"
        _print_error(errors, f"unknown verb {tokens[0]!r}: {hint}")
        return EXIT_USAGE
    if "--port" in tokens and tokens[0] == "serve":
        _print_error(errors, "--port: each wire has a port of its own, --wire NAME:PORT, as --wire http:8001")
        return EXIT_USAGE
    before = progress.listen(terminal.show_task), progress.tell(terminal.say)
    try:
        config = settings.take_config(tokens)
        with hints.read_by("command line"):
            result = build_app(config)(
                tokens, exit_on_error=False, console=terminal.console(), error_console=errors
            )
        return result if isinstance(result, int) else 0
    except CycloptsError:
        return EXIT_USAGE  # cyclopts has already printed what is wrong with the arguments
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`sinew inspect … | head`). Python flushes stdout once more at exit.
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
        terminal.take_json([])  # what one command asked for is not said to the next


def _words(error: Exception) -> str:
    """One line for a user: what can be mended is said as it is, the rest is called what it is."""
    if isinstance(error, SinewError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("sinew."):
        return str(MissingPackageError("this command", error.name))
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror or error}"
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first} (a fault of this program; `--debug` shows where)"


def _print_error(console: Console, message: str) -> None:
    console.print(f"[bold red]error:[/] {escape(message)}", highlight=False)


def _take_flag(tokens: list[str], flag: str) -> bool:
    """Remove a flag that may stand anywhere before ``--``."""
    end = tokens.index("--") if "--" in tokens else len(tokens)
    found = flag in tokens[:end]
    tokens[:end] = [token for token in tokens[:end] if token != flag]
    return found
