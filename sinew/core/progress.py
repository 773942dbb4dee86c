"""Report the progress of long computations from modules below the command line.

Without a listener, a task writes one line to the log. ``sinew.cli.terminal`` is a listener that shows a bar or a
spinner. :func:`say` prints a sentence that every user must see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

log = logging.getLogger(__name__)

# The task calls this function when a part is done; the argument is the name of the next part.
Advance = Callable[[str], None]
Listener = Callable[[str, "int | None"], AbstractContextManager[Advance]]

_listener: Listener | None = None
_teller: Callable[[str], None] | None = None


def listen(listener: Listener | None) -> Listener | None:
    """Show tasks with ``listener``, and return the previous listener. None shows them only in the log."""
    global _listener
    before, _listener = _listener, listener
    return before


def tell(teller: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """Send the sentences of :func:`say` to the function ``teller``, and return the previous function.

    None sends the sentences to the log.
    """
    global _teller
    before, _teller = _teller, teller
    return before


def say(text: str) -> None:
    """Print one sentence that every user should see, for example that a large download begins."""
    if _teller is None:
        log.warning("%s", text)  # a warning, because Python prints warnings even if logging was not set up
    else:
        _teller(text)


@contextmanager
def task(text: str, total: int | None = None) -> Iterator[Advance]:
    """Announce a long task. The ``with`` block receives a function, and calls this function after each part of the
    task.

    Args:
        text: Name of the task.
        total: Number of parts; None if unknown.
    """
    log.info("%s", text)
    if _listener is None:
        yield lambda _: None
        return
    with _listener(text, total) as advance:
        yield advance
