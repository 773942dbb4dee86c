"""Exit codes, and the reasons why a completed run ends with a code other than 0 (docs/control.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from sinew.cli import terminal

EXIT_ERROR, EXIT_USAGE, EXIT_FAULTS, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 3, 130, 141

# If this many requests in a row have no answer at the end of a run, the run has failed. A single request may only be
# late.
UNANSWERED = 2
PAUSED = "paused"


def text_of(faults: Mapping[str, Any]) -> str:
    """Return the errors of a report in one line; "" if there are none. ``faults`` is a result of ``Faults.to_dict``."""
    kinds = ", ".join(f"{count} x {kind}" for kind, count in faults.get("kinds", {}).items())
    return f"{faults['total']} errors ({kinds}); the first: {faults['first']}" if faults.get("total") else ""


def problems(
    faults: Mapping[str, Any], executed: int, held: Mapping[str, int], stopped: bool, unanswered: int = 0
) -> list[str]:
    """Return the problems of a robot's run, one sentence each; [] if there are none.

    A late, lost or superseded answer is not a problem if the robot moved again afterwards.

    Args:
        faults: The errors of the run.
        executed: Number of control steps with a command.
        held: Reason of a hold -> number of control steps.
        stopped: True if the user ended the run, which may happen before the first command.
        unanswered: Number of requests without an answer since the last chunk.
    """
    sentences = [text] if (text := text_of(faults)) else []
    if unanswered >= UNANSWERED:
        sentences.append(f"the last {unanswered} requests had no answer")
    waited = {reason: count for reason, count in held.items() if reason != PAUSED}
    if not executed and waited and not stopped:
        most = max(waited, key=lambda reason: waited[reason])
        sentences.append(f"the robot was held all the time and never got a command: {most}")
    return sentences


def ended(errors: list[str]) -> int:
    """Print the errors of a run that has ended, and return the exit code of the command."""
    for text in errors:
        terminal.console(stderr=True).print(f"[bold red]failed:[/] {escape(text)}")
    return EXIT_FAULTS if errors else 0
