"""What a long computation tells while it runs. Rooms below the command line report here.

Without a listener a task is one line of the log. ``sinew.cli.terminal`` listens and shows a bar or a spinner instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

log = logging.getLogger(__name__)

Advance = Callable[[str], None]  # one part is done; the text says what comes next
Listener = Callable[[str, "int | None"], AbstractContextManager[Advance]]

_listener: Listener | None = None


def listen(listener: Listener | None) -> Listener | None:
    """Show tasks with ``listener`` (None: in the log alone), and return the one before."""
    global _listener
    before, _listener = _listener, listener
    return before


@contextmanager
def task(text: str, total: int | None = None) -> Iterator[Advance]:
    """Tell that something long runs inside; what it yields is to be called after each of ``total`` parts."""
    log.info("%s", text)
    if _listener is None:
        yield lambda _: None
        return
    with _listener(text, total) as advance:
        yield advance
