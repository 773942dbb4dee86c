"""Progress of long computations, reported by modules below the command line.

Without a listener, a task is one line of the log. ``sinew.cli.terminal`` listens and shows a bar or a spinner.
:func:`say` prints what a user must know in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

log = logging.getLogger(__name__)

Advance = Callable[[str], None]  # called when a part is done, with the name of the next part
Listener = Callable[[str, "int | None"], AbstractContextManager[Advance]]

_listener: Listener | None = None
_teller: Callable[[str], None] | None = None


def listen(listener: Listener | None) -> Listener | None:
    """Show tasks with ``listener`` (None: in the log alone), and return the one before."""
    global _listener
    before, _listener = _listener, listener
    return before


def tell(teller: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """Send the sentences of :func:`say` to ``teller`` (None for the log), and return the previous one."""
    global _teller
    before, _teller = _teller, teller
    return before


def say(text: str) -> None:
    """Print one sentence that every user should see, such as a large download or the use of a copy."""
    if _teller is None:
        log.warning("%s", text)  # Python prints warnings even if logging was not set up
    else:
        _teller(text)


@contextmanager
def task(text: str, total: int | None = None) -> Iterator[Advance]:
    """Tell that something long runs inside; what it yields is to be called after each of ``total`` parts."""
    log.info("%s", text)
    if _listener is None:
        yield lambda _: None
        return
    with _listener(text, total) as advance:
        yield advance
