"""Exit codes, and what makes a run end with another one than 0 although it came to its end (docs/control.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from sinew.cli import terminal

EXIT_ERROR, EXIT_USAGE, EXIT_FAULTS, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 3, 130, 141

UNANSWERED = 2  # requests in a row, at the end of a run, that are more than one late answer
PAUSED = "paused"


def text_of(faults: Mapping[str, Any]) -> str:
    """Return the errors of a report in one line; "" without any. faults: From ``Faults.to_dict``."""
    kinds = ", ".join(f"{count} x {kind}" for kind, count in faults.get("kinds", {}).items())
    return f"{faults['total']} errors ({kinds}); the first: {faults['first']}" if faults.get("total") else ""


def problems(
    faults: Mapping[str, Any], executed: int, held: Mapping[str, int], stopped: bool, unanswered: int = 0
) -> list[str]:
    """Return why a robot's run did not go as it should have, a sentence each; none where it did.

    faults: errors inside. A late, lost or superseded answer is none as long as the robot went on afterwards:
    unanswered counts those since the last chunk. executed, held: steps with a command, and without one by reason.
    stopped: somebody ended the run, who may do so before the first command.
    """
    found = [text] if (text := text_of(faults)) else []
    if unanswered >= UNANSWERED:
        found.append(f"the last {unanswered} requests had no answer")
    waited = {reason: count for reason, count in held.items() if reason != PAUSED}
    if not executed and waited and not stopped:
        most = max(waited, key=lambda reason: waited[reason])
        found.append(f"the robot was held all the time and never got a command: {most}")
    return found


def ended(found: list[str]) -> int:
    """Print the errors of a run that has ended, and return its exit code."""
    for text in found:
        terminal.console(stderr=True).print(f"[bold red]failed:[/] {escape(text)}")
    return EXIT_FAULTS if found else 0
