"""What a long computation tells while it runs. Rooms below the command line report here.

Without a listener a task is one line of the log. ``sinew.cli.terminal`` listens and shows a bar or a spinner instead.
What a user has to know of in any case goes through :func:`say`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

log = logging.getLogger(__name__)

Advance = Callable[[str], None]  # one part is done; the text says what comes next
Listener = Callable[[str, "int | None"], AbstractContextManager[Advance]]

_listener: Listener | None = None
_teller: Callable[[str], None] | None = None


def listen(listener: Listener | None) -> Listener | None:
    """Show tasks with ``listener`` (None: in the log alone), and return the one before."""
    global _listener
    before, _listener = _listener, listener
    return before


def tell(teller: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """Give the sentences of :func:`say` to ``teller`` (None: to the log), and return the one before."""
    global _teller
    before, _teller = _teller, teller
    return before


def say(text: str) -> None:
    """Tell one sentence that nobody asked for and everybody should see: gigabytes are fetched, a copy is used."""
    if _teller is None:
        log.warning("%s", text)  # which Python prints where logging was not set up
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
