"""A listener that calls a function with each command of a control loop."""

from __future__ import annotations

from typing import Callable

from sinew_client.control.controller import Command
from sinew_client.control.listeners.listener import LoopListener


class CommandListener(LoopListener):
    """Calls the function ``watcher`` in each control step, with the command of this step (which may be a hold)."""

    def __init__(self, watcher: Callable[[Command], None]):
        self._watcher = watcher

    def command(self, command: Command) -> None:
        self._watcher(command)
